/* Threads and their scratch memory.
 *
 * A job is a number of items that any thread may take, one by one. The caller works too, and at the end waits only for
 * threads that are inside an item: a worker that is asleep, or that the system has not scheduled, is never waited for.
 * OpenMP is not used because its regions end in a barrier of all threads and its idle threads spin for milliseconds:
 * where the cores have other work too (publication, a web server), hundreds of small regions a token then wait for the
 * scheduler.
 *
 * One job runs at a time; a caller that finds the pool taken does its items alone.
 */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api.h"

#define OPEN (1u << 31)
#define INSIDE 0xffffu      /* workers inside the job */
#define LIMIT_SHIFT 16      /* workers that may be inside */
#define MAX_WORKERS 1023
#define SPIN_NS 200000      /* a worker looks for the next job this long before it sleeps */

static int64_t thread_count = 1;

static pthread_mutex_t taken = PTHREAD_MUTEX_INITIALIZER; /* held by the caller of the running job */
static int64_t workers;                                   /* started so far; under `taken` */
static struct {
    nm_body body;
    const void *context;
    int64_t items;
} job; /* written while the gate is closed and nobody is inside */
static int64_t next_item;
static uint32_t gate;  /* OPEN | limit << 16 | inside */
static uint32_t epoch; /* number of the job */

static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleep_end = PTHREAD_COND_INITIALIZER;
static int sleepers;

static void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void take_items(void) {
    const uint64_t mode = nm_float_mode(NM_MODE_DEFAULT);
    for (;;) {
        const int64_t item = __atomic_fetch_add(&next_item, 1, __ATOMIC_RELAXED);
        if (item >= job.items) break;
        job.body(job.context, item);
    }
    nm_float_mode(mode);
}

/* Enters the job if it is open and has a seat; the caller cannot end it while somebody is inside. */
static int enter(void) {
    uint32_t g = __atomic_load_n(&gate, __ATOMIC_RELAXED);
    while ((g & OPEN) && (g & INSIDE) < (g >> LIMIT_SHIFT & 0x7fff))
        if (__atomic_compare_exchange_n(&gate, &g, g + 1, 1, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return 1;
    return 0;
}

static void *worker(void *unused) {
    (void)unused;
    uint32_t done = 0;
    int64_t since = now_ns();
    for (unsigned turn = 1;; turn++) {
        const uint32_t e = __atomic_load_n(&epoch, __ATOMIC_SEQ_CST);
        if (e != done && enter()) {
            take_items();
            __atomic_fetch_sub(&gate, 1, __ATOMIC_RELEASE);
            done = e;
            since = now_ns();
            continue;
        }
        pause_cpu();
        if (turn % 64 || now_ns() - since < SPIN_NS) continue;
        __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
        pthread_mutex_lock(&sleep_lock);
        while (__atomic_load_n(&epoch, __ATOMIC_SEQ_CST) == e) pthread_cond_wait(&sleep_end, &sleep_lock);
        pthread_mutex_unlock(&sleep_lock);
        __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
        since = now_ns();
    }
    return NULL;
}

/* Signals stay with the threads of the host program. */
static void start_workers(int64_t wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; workers < wanted; workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL)) break; /* fewer threads only make it slower */
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void nm_set_thread_count(int64_t n) {
    __atomic_store_n(&thread_count, n < 1 ? 1 : n > MAX_WORKERS ? MAX_WORKERS : n, __ATOMIC_RELAXED);
}

int64_t nm_threads(void) { return __atomic_load_n(&thread_count, __ATOMIC_RELAXED); }

void nm_for(int64_t items, int64_t threads, nm_body body, const void *context) {
    if (threads > items) threads = items;
    if (threads <= 1 || pthread_mutex_trylock(&taken)) {
        const uint64_t mode = nm_float_mode(NM_MODE_DEFAULT);
        for (int64_t i = 0; i < items; i++) body(context, i);
        nm_float_mode(mode);
        return;
    }
    if (workers < threads - 1) start_workers(threads - 1);
    job.body = body;
    job.context = context;
    job.items = items;
    __atomic_store_n(&next_item, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&gate, OPEN | (uint32_t)(threads - 1) << LIMIT_SHIFT, __ATOMIC_RELEASE);
    __atomic_fetch_add(&epoch, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&sleep_end);
        pthread_mutex_unlock(&sleep_lock);
    }
    take_items();
    uint32_t g = __atomic_and_fetch(&gate, ~OPEN, __ATOMIC_ACQUIRE);
    for (unsigned turn = 1; g & INSIDE; turn++) {
        if (turn % 4096) pause_cpu();
        else sched_yield(); /* a worker lost its core inside an item */
        g = __atomic_load_n(&gate, __ATOMIC_ACQUIRE);
    }
    pthread_mutex_unlock(&taken);
}

/* ---- scratch ---- */

typedef struct {
    void *memory[4];
    size_t size[4];
} scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void free_scratch(void *kept) {
    for (int i = 0; i < 4; i++) free(((scratch *)kept)->memory[i]);
    free(kept);
}

static void make_key(void) { pthread_key_create(&scratch_key, free_scratch); }

void *nm_scratch(int slot, size_t bytes) {
    pthread_once(&scratch_once, make_key);
    scratch *kept = pthread_getspecific(scratch_key);
    if (!kept) {
        kept = calloc(1, sizeof(scratch));
        if (!kept) return NULL;
        if (pthread_setspecific(scratch_key, kept)) {
            free(kept);
            return NULL;
        }
    }
    if (kept->size[slot] < bytes) {
        free(kept->memory[slot]);
        kept->memory[slot] = NULL;
        kept->size[slot] = 0;
        const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        if (posix_memalign(&kept->memory[slot], 64, size)) {
            kept->memory[slot] = NULL;
            return NULL;
        }
        kept->size[slot] = size;
    }
    return kept->memory[slot];
}
