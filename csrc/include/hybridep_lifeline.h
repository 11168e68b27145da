// SPDX-License-Identifier: Apache-2.0
//
// A thread outside Python that writes a byte a second to some sockets.  Others know from it that this process lives
// even while C code keeps the interpreter's lock.  A stopped process writes nothing.

#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace hybridep {

class Lifeline {
   public:
    // The one of this process.  Never destroyed: its thread may run until the process has ended.
    static Lifeline& get() {
        static Lifeline* const lifeline = new Lifeline;
        return *lifeline;
    }

    // Write to `socket` from now on, by way of a copy of the descriptor.  Returns the copy, for `stop`.
    int start(int socket, int period_ms) {
        const std::lock_guard lock(mutex_);
        period_ = std::chrono::milliseconds(period_ms);
        if (!is_running_) run();  // the thread waits for the lock
        const int copy = fcntl(socket, F_DUPFD_CLOEXEC, 0);
        if (copy < 0) throw std::system_error(errno, std::generic_category(), "lifeline");
        sockets_.push_back(copy);
        return copy;
    }

    // Close the copy.  In a forked process it is closed already, and this does nothing.
    void stop(int copy) {
        const std::lock_guard lock(mutex_);
        if (std::erase(sockets_, copy)) close(copy);
        changed_.notify_all();  // without sockets the thread ends
    }

   private:
    Lifeline() { pthread_atfork(&before_fork, &in_parent, &in_child); }

    // The caller holds the lock.
    void run() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
        try {
            std::thread([this] { beat(); }).detach();
            is_running_ = true;
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void beat() {
        std::unique_lock lock(mutex_);
        while (!sockets_.empty()) {
            for (const int socket : sockets_) send(socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
            changed_.wait_for(lock, period_, [this] { return sockets_.empty(); });
        }
        is_running_ = false;
    }

    static void before_fork() { get().mutex_.lock(); }
    static void in_parent() { get().mutex_.unlock(); }

    // The child has no such thread, and the connections are the parent's.
    static void in_child() {
        Lifeline& lifeline = get();
        for (const int socket : lifeline.sockets_) close(socket);
        lifeline.sockets_.clear();
        lifeline.is_running_ = false;
        new (&lifeline.changed_) std::condition_variable;  // the thread of the parent may wait for the old one
        lifeline.mutex_.unlock();
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<int> sockets_;
    std::chrono::milliseconds period_{1000};
    bool is_running_ = false;
};

}  // namespace hybridep
