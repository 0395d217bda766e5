/* The end with a reason, and the clock. */
#include "load.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void fail(const char *format, ...) {
    va_list words;
    va_start(words, format);
    vfprintf(stderr, format, words);
    va_end(words);
    fputc('\n', stderr);
    exit(1);
}

uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}
