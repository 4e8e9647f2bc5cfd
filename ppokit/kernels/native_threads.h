/* Work that is done at the same time. Threads live for one call: a pool would not survive a fork, and
 * beside work that is worth a thread their start is nothing. */

#if !defined(_WIN32)
#include <pthread.h>
#endif

#define MAX_THREADS 64

typedef struct {
    void (*work)(const void *);
    const void *argument;
} Task;

static void *do_task(void *task)
{
    ((Task *)task)->work(((Task *)task)->argument);
    return NULL;
}

/* Do the tasks, the first in this thread; where no other can be had, one after the other. */
static void do_all(Task *tasks, int64_t count)
{
    int started = 0;
#if !defined(_WIN32)
    pthread_t handles[MAX_THREADS];
#endif
    for (int64_t i = count - 1; i >= 0; i--) {
#if !defined(_WIN32)
        if (i && !pthread_create(&handles[started], NULL, do_task, &tasks[i])) {
            started++;
            continue;
        }
#endif
        do_task(&tasks[i]);
    }
#if !defined(_WIN32)
    while (started)
        pthread_join(handles[--started], NULL);
#endif
    (void)started;
}
