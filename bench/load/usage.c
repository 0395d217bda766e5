/* What the processes took: CPU of all their threads and resident memory, as the kernel counts them. */
#include "load.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static double cpu_of(int pid) {
    char path[64], text[2048];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) fail("process %d is gone", pid);
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[size] = 0;
    unsigned long user = 0, system = 0; /* fields 14 and 15; the name before them may hold blanks */
    char *rest = strrchr(text, ')');
    if (!rest || sscanf(rest, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system) != 2)
        fail("cannot read %s", path);
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

double cpu_seconds(const int *pids, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += cpu_of(pids[i]);
    return sum;
}

double own_cpu_seconds(void) {
    struct rusage own;
    getrusage(RUSAGE_SELF, &own);
    return (double)(own.ru_utime.tv_sec + own.ru_stime.tv_sec) +
           (double)(own.ru_utime.tv_usec + own.ru_stime.tv_usec) / 1e6;
}

long resident_kib(const int *pids, size_t count) {
    long sum = 0;
    for (size_t i = 0; i < count; i++) {
        char path[64];
        long pages = 0;
        snprintf(path, sizeof path, "/proc/%d/statm", pids[i]);
        FILE *file = fopen(path, "r");
        if (!file || fscanf(file, "%*d %ld", &pages) != 1) fail("process %d is gone", pids[i]);
        fclose(file);
        sum += pages * (sysconf(_SC_PAGESIZE) / 1024);
    }
    return sum;
}
