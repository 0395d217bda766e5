/* Deliveries: marks found in what arrives, in order per subscriber, each with the time it took. */
#include "load.h"

#include <stdlib.h>
#include <string.h>

static uint64_t hex(const char *at, int digits) {
    uint64_t value = 0;
    for (int i = 0; i < digits; i++) value = value << 4 | (uint64_t)(at[i] <= '9' ? at[i] - '0' : at[i] - 'a' + 10);
    return value;
}

static void keep(Deliveries *into, uint64_t micros) {
    if (into->kept == into->space) {
        into->space = into->space ? 2 * into->space : 1 << 16;
        into->micros = realloc(into->micros, into->space * sizeof(uint32_t));
    }
    into->micros[into->kept++] = micros > UINT32_MAX ? UINT32_MAX : (uint32_t)micros;
}

static void deliver(Connection *from, Deliveries *into, const char *mark, uint64_t now) {
    uint32_t number = (uint32_t)hex(mark + 19, 8);
    into->seen++;
    if (number <= from->last) into->disordered++;
    from->last = number;
    if (into->keeping) keep(into, (now - hex(mark + 3, 16)) / 1000);
}

/* There are CARRY writable bytes before `at`: what was carried over is put there. */
void scan(Connection *from, Deliveries *into, char *at, size_t size, uint64_t now) {
    char *end = at + size, *place = at - from->carried;
    memcpy(place, from->carry, from->carried);
    from->carried = 0;
    while (place < end && (place = memchr(place, '@', (size_t)(end - place)))) {
        if (end - place < MARK) {
            from->carried = (size_t)(end - place);
            memcpy(from->carry, place, from->carried);
            return;
        }
        if (place[1] == 'h' && place[2] == 'w') {
            deliver(from, into, place, now);
            place += MARK;
        } else
            place++;
    }
}

static int smaller(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

uint32_t percentile(Deliveries *of, double part) {
    if (!of->kept) return 0;
    qsort(of->micros, of->kept, sizeof(uint32_t), smaller);
    return of->micros[(size_t)(part * (double)(of->kept - 1))];
}
