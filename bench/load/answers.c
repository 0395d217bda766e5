/* Where an answer ends: HTTP with a length, and the replies of Redis. An answer that says no ends the run. */
#include "load.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static int is_http(const Connection *of) { return of->held && of->answer[0] == 'H'; }

static size_t http_head(const Connection *of) {
    char *end = memmem(of->answer, of->held, "\r\n\r\n", 4);
    if (!end) return 0;
    if (of->answer[9] != '2' && memcmp(of->answer + 9, "101", 3))
        fail("refused: %.*s", (int)(of->held < 1500 ? of->held : 1500), of->answer);
    return (size_t)(end - of->answer) + 4;
}

static size_t body_size(const Connection *of, size_t head) {
    for (char *line = of->answer; (line = memchr(line, '\n', head - (size_t)(line - of->answer)));) {
        line++;
        if (!strncasecmp(line, "content-length:", 15)) return strtoul(line + 15, NULL, 10);
    }
    fail("an answer without a length: %.*s", (int)head, of->answer);
}

static size_t line_of_redis(const Connection *of) {
    char *end = of->held ? memchr(of->answer, '\n', of->held) : NULL;
    if (!end) return 0;
    if (of->answer[0] == '-') fail("refused: %.*s", (int)(end - of->answer), of->answer);
    return (size_t)(end - of->answer) + 1;
}

/* The answer to SUBSCRIBE ends with the number of channels, ":1". */
static size_t subscribed(const Connection *of) {
    char *end = memmem(of->answer, of->held, ":1\r\n", 4);
    return end ? (size_t)(end - of->answer) + 4 : 0;
}

size_t head_of_stream(const Connection *of) {
    if (!of->held) return 0;
    return is_http(of) ? http_head(of) : subscribed(of);
}

size_t whole_answer(const Connection *of, uint64_t *next_offset) {
    if (!is_http(of)) return line_of_redis(of);
    size_t head = http_head(of), size = head ? body_size(of, head) : 0;
    if (!head || of->held < head + size) return 0;
    const char *body = of->answer + head;
    if (memmem(body, size, "\"ok\":false", 10)) fail("refused: %.*s", (int)size, body);
    char *next = memmem(body, size, "\"next_offset\":", 14);
    if (next) *next_offset = strtoull(next + 14, NULL, 10);
    return head + size;
}
