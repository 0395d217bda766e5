/* One thread, epoll, raw sockets: many subscribers, a few publishers, and what each delivery took.
 *
 * A mark is the text "@hw", the time of publishing (16 hex digits, ns of CLOCK_MONOTONIC) and a number
 * (8 hex digits). Whoever starts us gives the bytes to send; we stamp the marks in what is published and look
 * for marks in what comes back, so nothing here knows which server it talks to. */
#ifndef LOAD_H
#define LOAD_H

#include <stddef.h>
#include <stdint.h>

enum { MARK = 27, CARRY = 32, ROOM = 1 << 18 };

typedef struct {
    char *at;
    size_t size;
} Bytes;

typedef struct {
    Bytes *all;
    size_t count;
} Requests;

enum Kind { STREAM, POLL, PUBLISHER, TIMER };

typedef struct {
    enum Kind kind;
    int fd;
    int ready;          /* the head of the stream has come; a poll has been answered once */
    const Bytes *asks;  /* what was sent to begin */
    uint32_t last;      /* number of the last mark seen */
    char carry[CARRY];  /* the end of the last read, when it may be half a mark */
    size_t carried;
    char *answer;       /* an answer, or the head of a stream, that is not yet complete */
    size_t held;
} Connection;

typedef struct {
    uint64_t seen, disordered;
    uint32_t *micros;   /* one latency per delivery while keeping is on */
    size_t kept, space;
    int keeping;
} Deliveries;

/* fail.c */
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
uint64_t now_ns(void);

/* requests.c: files of requests, each "<length>\n<bytes>" */
Requests read_requests(const char *path);
size_t count_marks(const Bytes *request);
void stamp(const Bytes *request, uint64_t at, uint32_t *number);
void set_offset(const Bytes *request, uint64_t offset);

/* marks.c */
void scan(Connection *from, Deliveries *into, char *at, size_t size, uint64_t now);
uint32_t percentile(Deliveries *of, double part);

/* answers.c: each returns the size of the first whole answer, 0 when it has not all come */
size_t head_of_stream(const Connection *of);
size_t whole_answer(const Connection *of, uint64_t *next_offset);

/* usage.c */
double cpu_seconds(const int *pids, size_t count);
double own_cpu_seconds(void);
long resident_kib(const int *pids, size_t count);

#endif
