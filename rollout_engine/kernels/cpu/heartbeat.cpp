// A thread that needs no interpreter: it counts heartbeats where other processes read them, or sends them as bytes, and
// ends this process if it outlives its parent.
#include <ftw.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#ifdef POLLRDHUP
constexpr short kEnd = POLLRDHUP;  // the other end is closed, whatever bytes wait here
#else
constexpr short kEnd = 0;  // the end is reported whatever is asked for
#endif

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // Python ignores SIGPIPE
#endif

namespace {

struct Heart {
    uint64_t* beats;  // null: each beat is a byte sent over the lifeline
    int lifeline;     // its other end is the parent's
    int interval_ms;
    int orphan_ms;
    std::string directory;  // removed at the end; "": none
};

int remove_one(const char* path, const struct stat*, int, struct FTW*) { return remove(path); }

void* beat(void* given) {
    Heart* heart = static_cast<Heart*>(given);
    int orphaned_ms = 0;
    while (orphaned_ms <= heart->orphan_ms) {
        if (heart->beats) {
            __atomic_fetch_add(heart->beats, 1, __ATOMIC_RELAXED);
        } else {
            (void)!send(heart->lifeline, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);  // a parent that reads none has enough
        }
        pollfd end = {heart->lifeline, kEnd, 0};
        if (poll(&end, 1, heart->interval_ms) > 0) {
            const timespec interval = {heart->interval_ms / 1000, heart->interval_ms % 1000 * 1000000L};
            nanosleep(&interval, nullptr);
            orphaned_ms += heart->interval_ms;
        }
    }
    if (!heart->directory.empty()) nftw(heart->directory.c_str(), remove_one, 16, FTW_DEPTH | FTW_PHYS);
    _exit(1);
}

}  // namespace

// Start the thread. Returns 0, or the error of the system.
extern "C" int32_t heartbeat_start(uint64_t* beats, int32_t lifeline, const char* directory, int32_t interval_ms,
                                   int32_t orphan_ms) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the interpreter's threads
    Heart* heart = new Heart{beats, lifeline, interval_ms, orphan_ms, directory};
    pthread_t thread;
    const int error = pthread_create(&thread, nullptr, beat, heart);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error) {
        delete heart;
    } else {
        pthread_detach(thread);
    }
    return error;
}
