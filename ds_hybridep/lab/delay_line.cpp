// SPDX-License-Identifier: Apache-2.0
//
// A cable with a delay, in one direction: joins two TAP devices, each in a network namespace of its own.
//
//     delay_line NETNS_A DEVICE_A NETNS_B DEVICE_B
//
// Creates both devices and prints "ready". Then it hands every frame that leaves by device A to device B. Two int64
// values on stdin (DELAY_NS LOSS_PPM, 0 0 at first) say how many nanoseconds after it was read, and how many of a
// million frames are lost. No frame overtakes another, so a first-in first-out queue is ordered by time. A packet that
// the sender's kernel left to be segmented later (up to 64 KB, described by a virtio_net_hdr in front of the frame)
// passes as one piece: otherwise a system call for each 1.5 KB frame would be the bottleneck.
//
// The program ends, and its devices with it, at the end of stdin: when the process at the other end has ended.

#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <vector>

constexpr size_t kMaxFrameBytes = 10 + 14 + 65536;    // virtio_net_hdr, Ethernet header, largest IP packet
constexpr size_t kMaxQueuedBytes = size_t{1} << 30;   // reaching it is a sign of trouble
constexpr int kFramesPerTurn = 64;                    // read before looking at the clock
constexpr int64_t kNsPerS = 1000000000;

struct Frame {
    int64_t due_ns;  // CLOCK_MONOTONIC
    std::vector<char> bytes;
};

struct Orders {
    int64_t delay_ns, loss_ppm;
};

static void fail(const char* what, const char* which) {
    fprintf(stderr, "delay_line: %s %s: %s\n", what, which, strerror(errno));
    exit(1);
}

static int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * kNsPerS + time.tv_nsec;
}

// Creates TAP device `name` in the namespace called `netns`. The device lives as long as the returned descriptor.
static int open_tap(const char* netns, const char* name) {
    const int netns_fd = open((std::string("/run/netns/") + netns).c_str(), O_RDONLY | O_CLOEXEC);
    if (netns_fd < 0) fail("cannot open namespace", netns);
    if (setns(netns_fd, CLONE_NEWNET) < 0) fail("cannot enter namespace", netns);
    close(netns_fd);

    const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) fail("cannot open", "/dev/net/tun (needs root; modprobe tun; in a container: --device /dev/net/tun)");
    ifreq request = {};
    request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    if (ioctl(fd, TUNSETIFF, &request) < 0) fail("cannot create TAP device", name);
    // Both ends promise to take unsegmented packets, so each may pass them on unchanged.
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) < 0) fail("cannot set offloads of", name);
    return fd;
}

class Cable {
public:
    Cable(int from_fd, int to_fd) : from_fd_(from_fd), to_fd_(to_fd) {}

    void receive(Orders orders) {
        for (int i = 0; i < kFramesPerTurn; ++i) {
            const ssize_t num_bytes = read(from_fd_, buffer_, sizeof buffer_);
            if (num_bytes < 0) {
                if (errno == EAGAIN || errno == EINTR) return;
                fail("cannot read from", "a TAP device");  // it was deleted
            }
            if (int64_t(random_() % 1000000) < orders.loss_ppm) continue;
            last_due_ns_ = std::max(last_due_ns_, now_ns() + orders.delay_ns);
            queue_.push_back({last_due_ns_, std::vector<char>(buffer_, buffer_ + num_bytes)});
            queued_bytes_ += num_bytes;
            if (queued_bytes_ > kMaxQueuedBytes) {
                errno = ENOBUFS;
                fail("cannot hold", "more than 1 GiB under way");
            }
        }
    }

    // Delivers the frames that are due. Returns the nanoseconds until the next one is due, or -1 if there is none.
    int64_t deliver_due() {
        while (!queue_.empty() && queue_.front().due_ns <= now_ns()) {
            const std::vector<char>& bytes = queue_.front().bytes;
            // A frame that the other side does not take (its device is down) is lost, as on a cable.
            while (write(to_fd_, bytes.data(), bytes.size()) < 0 && errno == EINTR) {
            }
            queued_bytes_ -= bytes.size();
            queue_.pop_front();
        }
        return queue_.empty() ? -1 : std::max<int64_t>(queue_.front().due_ns - now_ns(), 0);
    }

private:
    int from_fd_, to_fd_;
    char buffer_[kMaxFrameBytes];
    std::deque<Frame> queue_;  // due first
    size_t queued_bytes_ = 0;
    int64_t last_due_ns_ = 0;
    std::mt19937 random_;  // a fixed sequence
};

// Frames must not wait until the ranks' computations yield a core. This process needs only a small share of a core.
static void run_before_others() {
    const sched_param param = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR, &param) < 0) setpriority(PRIO_PROCESS, 0, -20);
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
}

int main(int argc, char** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s NETNS_A DEVICE_A NETNS_B DEVICE_B\n", argv[0]);
        return 2;
    }
    pollfd polled[2] = {{open_tap(argv[1], argv[2]), POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
    Cable cable(polled[0].fd, open_tap(argv[3], argv[4]));
    run_before_others();
    if (puts("ready") == EOF || fflush(stdout) == EOF) return 1;

    Orders orders = {0, 0};
    for (;;) {
        const int64_t wait_ns = cable.deliver_due();
        const timespec timeout = {.tv_sec = wait_ns / kNsPerS, .tv_nsec = wait_ns % kNsPerS};
        if (ppoll(polled, 2, wait_ns < 0 ? nullptr : &timeout, nullptr) < 0) {
            if (errno == EINTR) continue;
            fail("cannot wait for", "frames");
        }
        if (polled[1].revents != 0 && read(STDIN_FILENO, &orders, sizeof orders) <= 0) return 0;
        if (polled[0].revents != 0) cable.receive(orders);
    }
}
