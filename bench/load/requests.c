/* What is sent: requests read from a file, and the places in them that change from one sending to the next. */
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char FROM[] = "\"from_offset\":";
enum { DIGITS = 20 };

Requests read_requests(const char *path) {
    Requests found = {NULL, 0};
    FILE *file = fopen(path, "rb");
    if (!file) fail("cannot read %s", path);
    size_t size;
    while (fscanf(file, "%zu", &size) == 1) {
        Bytes one = {malloc(size + 1), size};
        if (fgetc(file) != '\n' || fread(one.at, 1, size, file) != size) fail("%s is cut short", path);
        one.at[size] = 0;
        found.all = realloc(found.all, (found.count + 1) * sizeof(Bytes));
        found.all[found.count++] = one;
    }
    fclose(file);
    return found;
}

size_t count_marks(const Bytes *request) {
    size_t count = 0;
    for (const char *at = request->at; (at = strstr(at, "@hw")); at += MARK) count++;
    return count;
}

static void hex(char *to, int digits, uint64_t value) {
    for (int i = digits - 1; i >= 0; i--, value >>= 4) to[i] = "0123456789abcdef"[value & 15];
}

void stamp(const Bytes *request, uint64_t at, uint32_t *number) {
    for (char *mark = request->at; (mark = strstr(mark, "@hw")); mark += MARK) {
        hex(mark + 3, 16, at);
        hex(mark + 19, 8, ++*number);
    }
}

/* JSON allows no leading zeros, so the number is followed by blanks. */
void set_offset(const Bytes *request, uint64_t offset) {
    char *place = strstr(request->at, FROM), text[DIGITS + 1];
    if (!place) fail("a poll needs %s and %d blanks", FROM, DIGITS);
    snprintf(text, sizeof text, "%-*llu", DIGITS, (unsigned long long)offset);
    memcpy(place + strlen(FROM), text, DIGITS);
}
