/* load --port P --pids A,B [--subscribers FILE] [--shots FILE] [--seconds S] [--rate R] ...: one run, one line of JSON.
 *
 * A shot is what is published at once: one or more requests with one or more marks. Closed loop (the default): the
 * next shot goes out when every subscriber has all of the last one and the publisher its answers. With --rate, R shots
 * a second, whatever comes back. Without shots somebody else publishes, and we only listen. */
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { AT_A_TIME = 128, PATIENCE_S = 15 };

static struct {
    int port, polling, per_mark, stalled, publishers, answers;
    double seconds, warm, idle, rate;
    int pids[64];
    size_t pid_count;
    Requests subscribers, shots;
} ask = {.per_mark = -1, .publishers = 1, .answers = 1, .seconds = 1.5, .warm = 0.3};

static Connection *subscribers, *publishers, timer = {.kind = TIMER};
static Deliveries deliveries;
static int epoll;
static size_t unready;
static uint64_t due, answers_due, shots, published, late;
static uint32_t number;
static char room[CARRY + ROOM];

/* --- connections ------------------------------------------------------------------------------------------------ */

static void send_all(Connection *to, const Bytes *request) {
    for (size_t sent = 0; sent < request->size;) {
        ssize_t done = send(to->fd, request->at + sent, request->size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (done > 0)
            sent += (size_t)done;
        else if (errno == EAGAIN)
            poll(&(struct pollfd){to->fd, POLLOUT, 0}, 1, 100);
        else
            fail("cannot send: %s", strerror(errno));
    }
}

static void watch(Connection *one, int operation) {
    struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = one};
    if (epoll_ctl(epoll, operation, one->fd, &wanted)) fail("epoll: %s", strerror(errno));
}

static void open_connection(Connection *one, enum Kind kind, int port, int receive_buffer) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    one->kind = kind;
    one->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (one->fd < 0) fail("no more sockets: %s", strerror(errno));
    setsockopt(one->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    /* Reset at the end: ten thousand ports waiting for stray packets would starve the next run. */
    setsockopt(one->fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
    if (receive_buffer) setsockopt(one->fd, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(int));
    if (connect(one->fd, (struct sockaddr *)&to, sizeof to)) fail("cannot connect: %s", strerror(errno));
    fcntl(one->fd, F_SETFL, O_NONBLOCK);
    watch(one, EPOLL_CTL_ADD);
}

/* --- what arrives ----------------------------------------------------------------------------------------------- */

static void hold(Connection *from, const char *at, size_t size) {
    from->answer = realloc(from->answer, from->held + size);
    memcpy(from->answer + from->held, at, size);
    from->held += size;
}

static void drop(Connection *from, size_t size) {
    memmove(from->answer, from->answer + size, from->held - size);
    from->held -= size;
}

static void begin_stream(Connection *from, uint64_t now) {
    size_t head = head_of_stream(from), rest = from->held - head;
    if (!head) return;
    from->ready = 1;
    unready--;
    memcpy(room + CARRY, from->answer + head, rest);
    free(from->answer);
    from->answer = NULL;
    from->held = 0;
    scan(from, &deliveries, room + CARRY, rest, now);
}

static void answered(Connection *from, uint64_t now) {
    uint64_t next = 0;
    for (size_t size; (size = whole_answer(from, &next));) {
        if (from->kind == PUBLISHER && answers_due) answers_due--;
        if (from->kind == POLL) {
            char *copy = malloc(CARRY + size);
            memcpy(copy + CARRY, from->answer, size);
            from->carried = 0;
            scan(from, &deliveries, copy + CARRY, size, now);
            free(copy);
            set_offset(from->asks, next);
            send_all(from, from->asks);
        }
        drop(from, size);
    }
}

static void shoot(void);

static void arrived(Connection *from) {
    if (from->kind == TIMER) {
        uint64_t times = 0;
        if (read(from->fd, &times, sizeof times) != sizeof times) return;
        if (times > 1) late += times - 1;
        while (times--) shoot();
        return;
    }
    ssize_t size = read(from->fd, room + CARRY, ROOM);
    uint64_t now = now_ns();
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0) fail("the server closed a connection after %llu deliveries", (unsigned long long)deliveries.seen);
    if (from->kind == STREAM && from->ready) {
        scan(from, &deliveries, room + CARRY, (size_t)size, now);
        return;
    }
    hold(from, room + CARRY, (size_t)size);
    if (from->kind == STREAM)
        begin_stream(from, now);
    else
        answered(from, now);
}

static void wait_for(int milliseconds) {
    struct epoll_event found[1024];
    int count = epoll_wait(epoll, found, 1024, milliseconds);
    for (int i = 0; i < count; i++) arrived(found[i].data.ptr);
}

/* --- publishing ------------------------------------------------------------------------------------------------- */

static void shoot(void) {
    const Bytes *shot = &ask.shots.all[shots % ask.shots.count];
    uint32_t before = number;
    stamp(shot, now_ns(), &number);
    due += (uint64_t)(number - before) * (uint64_t)ask.per_mark;
    answers_due += (uint64_t)ask.answers;
    published += number - before;
    send_all(&publishers[shots++ % (uint64_t)ask.publishers], shot);
}

static int settled(void) { return deliveries.seen >= due && !answers_due; }

static void settle(void) {
    uint64_t seen = deliveries.seen, since = now_ns();
    while (!settled()) {
        wait_for(100);
        if (deliveries.seen != seen) seen = deliveries.seen, since = now_ns();
        if (now_ns() - since > PATIENCE_S * 1000000000ull)
            fail("%llu of %llu deliveries and %llu answers are missing", (unsigned long long)(due - deliveries.seen),
                 (unsigned long long)due, (unsigned long long)answers_due);
    }
}

static void rest(double seconds) {
    for (uint64_t end = now_ns() + (uint64_t)(seconds * 1e9); now_ns() < end;) wait_for(20);
}

static void set_timer(double rate) {
    struct itimerspec every = {0};
    if (rate > 0) every.it_interval.tv_nsec = every.it_value.tv_nsec = (long)(1e9 / rate);
    timerfd_settime(timer.fd, 0, &every, NULL);
}

static long publish_for(double seconds) {
    uint64_t end = now_ns() + (uint64_t)(seconds * 1e9), sample = 0;
    long most = 0;
    if (!ask.shots.count) rest(seconds);
    if (ask.rate > 0) set_timer(ask.rate);
    for (uint64_t now; (now = now_ns()) < end;) {
        if (now > sample) {
            long kib = resident_kib(ask.pids, ask.pid_count);
            if (kib > most) most = kib;
            sample = now + 100000000;
        }
        if (ask.rate > 0)
            wait_for(10);
        else {
            shoot();
            settle();
        }
    }
    if (ask.rate > 0) set_timer(0);
    settle();
    return most;
}

/* --- the run ---------------------------------------------------------------------------------------------------- */

static void subscribe(void) {
    size_t count = ask.subscribers.count;
    subscribers = calloc(count + 1, sizeof(Connection));
    for (size_t i = 0; i < count; i++) {
        Connection *one = &subscribers[i];
        open_connection(one, ask.polling ? POLL : STREAM, ask.port, i < (size_t)ask.stalled ? 65536 : 0);
        one->asks = &ask.subscribers.all[i];
        send_all(one, one->asks);
        if (ask.polling) continue; /* a poll that waits says nothing */
        for (unready++; unready >= AT_A_TIME;) wait_for(100);
    }
    uint64_t since = now_ns();
    while (unready) {
        wait_for(100);
        if (now_ns() - since > PATIENCE_S * 1000000000ull) fail("%zu subscribers were not answered", unready);
    }
}

/* Some subscribers stop reading, then read on: they must get all they missed, and meanwhile cost little. */
static void stall(long reading_kib) {
    uint64_t before = published;
    for (int i = 0; i < ask.stalled; i++) epoll_ctl(epoll, EPOLL_CTL_DEL, subscribers[i].fd, NULL);
    ask.per_mark -= ask.stalled;
    long stalled_kib = publish_for(ask.seconds);
    uint64_t missed = published - before, since = now_ns();
    for (int i = 0; i < ask.stalled; i++) watch(&subscribers[i], EPOLL_CTL_ADD);
    ask.per_mark += ask.stalled;
    due += missed * (uint64_t)ask.stalled;
    settle();
    printf("\"reading_kib\":%ld,\"stalled_kib\":%ld,\"resumed_kib\":%ld,\"missed\":%llu,\"catch_up_s\":%.2f,", reading_kib,
           stalled_kib, resident_kib(ask.pids, ask.pid_count), (unsigned long long)missed, (double)(now_ns() - since) / 1e9);
}

static double share_of_a_core(double seconds) {
    double cpu = cpu_seconds(ask.pids, ask.pid_count);
    rest(seconds);
    return (cpu_seconds(ask.pids, ask.pid_count) - cpu) / seconds;
}

/* What the open connections cost when nothing happens, once the server has dealt with their coming. */
static double idle_share(void) {
    for (int tries = 0; share_of_a_core(0.5) > 0.5; tries++)
        if (tries > 2 * PATIENCE_S) fail("the server does not come to rest");
    rest(0.5);
    return share_of_a_core(ask.idle);
}

static void run(void) {
    double idle = ask.idle > 0 ? idle_share() : 0;
    if (ask.warm > 0) publish_for(ask.warm);
    uint64_t seen = deliveries.seen, count = published, first = shots, began = now_ns();
    double cpu = cpu_seconds(ask.pids, ask.pid_count), own = own_cpu_seconds();
    late = 0;
    deliveries.keeping = 1;
    long kib = publish_for(ask.seconds);
    deliveries.keeping = 0;
    double seconds = (double)(now_ns() - began) / 1e9;
    cpu = cpu_seconds(ask.pids, ask.pid_count) - cpu;
    own = own_cpu_seconds() - own;
    printf("{\"seconds\":%.4f,\"shots\":%llu,\"published\":%llu,\"deliveries\":%llu,\"server_s\":%.4f,\"client_s\":%.4f,"
           "\"idle_share\":%.5f,\"p50_us\":%u,\"p99_us\":%u,\"late\":%llu,\"disordered\":%llu,",
           seconds, (unsigned long long)(shots - first), (unsigned long long)(published - count),
           (unsigned long long)(deliveries.seen - seen), cpu, own, idle, percentile(&deliveries, 0.5),
           percentile(&deliveries, 0.99), (unsigned long long)late, (unsigned long long)deliveries.disordered);
    if (ask.stalled) stall(kib);
    printf("\"kib\":%ld,\"beyond\":%lld}\n", kib, (long long)(deliveries.seen - due));
}

static void read_pids(char *text) {
    for (char *one = strtok(text, ","); one; one = strtok(NULL, ",")) {
        if (ask.pid_count == sizeof ask.pids / sizeof *ask.pids) fail("too many processes");
        ask.pids[ask.pid_count++] = atoi(one);
    }
}

static void option(const char *name, char *value) {
    if (!strcmp(name, "--port")) ask.port = atoi(value);
    else if (!strcmp(name, "--pids")) read_pids(value);
    else if (!strcmp(name, "--subscribers")) ask.subscribers = read_requests(value);
    else if (!strcmp(name, "--shots")) ask.shots = read_requests(value);
    else if (!strcmp(name, "--answers")) ask.answers = atoi(value);       /* per shot */
    else if (!strcmp(name, "--per-mark")) ask.per_mark = atoi(value);     /* deliveries; default: all subscribers */
    else if (!strcmp(name, "--publishers")) ask.publishers = atoi(value); /* connections, taking turns */
    else if (!strcmp(name, "--polling")) ask.polling = atoi(value);       /* long polls, not streams */
    else if (!strcmp(name, "--stalled")) ask.stalled = atoi(value);
    else if (!strcmp(name, "--seconds")) ask.seconds = atof(value);
    else if (!strcmp(name, "--warm")) ask.warm = atof(value);
    else if (!strcmp(name, "--idle")) ask.idle = atof(value);             /* seconds of rest, measured, before */
    else if (!strcmp(name, "--rate")) ask.rate = atof(value);
    else fail("unknown option %s", name);
}

int main(int count, char **words) {
    struct rlimit files;
    for (int i = 1; i + 1 < count; i += 2) option(words[i], words[i + 1]);
    if (ask.per_mark < 0) ask.per_mark = (int)ask.subscribers.count;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    epoll = epoll_create1(0);
    timer.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    watch(&timer, EPOLL_CTL_ADD);
    publishers = calloc((size_t)ask.publishers, sizeof(Connection));
    for (int i = 0; i < ask.publishers && ask.shots.count; i++)
        open_connection(&publishers[i], PUBLISHER, ask.port, 0);
    subscribe();
    run();
    return 0;
}
