/* How the threads of a call share the processor with other work, and whether they spin or sleep while they wait.
 *
 * libgomp spins for milliseconds at a barrier unless there are more OpenMP threads than cores; then it spins for about a
 * microsecond and sleeps. That is its documented rule, looked at in every wait, so a few idle OpenMP threads more are
 * the switch from one to the other while a program runs.
 */
#define _GNU_SOURCE
#include "cpu_vectors.h"

volatile int tw_is_alone;

#if defined(__linux__) && defined(_OPENMP)
#include <fcntl.h>
#include <omp.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Nanoseconds that the calling thread has run, and has waited for a core while it could run. Returns 0, or 1 where the
 * kernel does not say. */
static int read_times(int64_t *run, int64_t *waited) {
    char text[96], *rest;
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 1;
    ssize_t size = read(file, text, sizeof(text) - 1);
    close(file);
    if (size <= 0) return 1;
    text[size] = 0;
    *run = strtoll(text, &rest, 10);
    *waited = strtoll(rest, NULL, 10);
    return 0;
}

/* Of each of the `threads` threads of a call: its id and its times, three numbers. Returns how many threads there were,
 * or 0 where the kernel does not say. */
int tw_thread_times(int64_t *times, int threads) {
    int count = 0, failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : count, failed)
    {
        int64_t *mine = times + 3 * omp_get_thread_num();
        mine[0] = syscall(SYS_gettid);
        failed += read_times(mine + 1, mine + 2);
        count += 1;
    }
    return failed ? 0 : count;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int64_t crowd; /* counts the crowds so far; an odd one is there */

/* Owns the idle threads: they end with the thread that has used them. */
static void *keep_crowd(void *size) {
    int present = 0;
#pragma omp parallel num_threads((int)(intptr_t)size) reduction(+ : present)
    present += 1;
    pthread_mutex_lock(&lock);
    int64_t mine = crowd;
    while (mine % 2 == 1 && crowd == mine) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* From now on the threads of calls that use `threads` of them sleep while they wait, or spin as the runtime likes; or
 * one of them does the work of all. */
void tw_set_waiting(int is_sleeping, int is_alone, int threads) {
    tw_is_alone = is_alone;
    int spare = omp_get_num_procs() - threads;
    intptr_t size = (spare > 0 ? spare : 0) + 2; /* the first of them is not counted: it is not the runtime's own */
    pthread_t owner;
    pthread_mutex_lock(&lock);
    if (is_sleeping && crowd % 2 == 0 && !pthread_create(&owner, NULL, keep_crowd, (void *)size)) {
        pthread_detach(owner);
        crowd += 1;
    } else if (!is_sleeping && crowd % 2 == 1) {
        crowd += 1;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
}
#else
int tw_thread_times(int64_t *times, int threads) {
    (void)times, (void)threads;
    return 0;
}

void tw_set_waiting(int is_sleeping, int is_alone, int threads) { (void)is_sleeping, (void)is_alone, (void)threads; }
#endif
