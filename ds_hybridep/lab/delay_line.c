// SPDX-License-Identifier: Apache-2.0
//
// A cable with a delay: joins two TAP devices, each in a network namespace of its own.
//
//     delay_line OWNER_PID  NETNS_A DEVICE_A  NETNS_B DEVICE_B  DELAY_AB_NS DELAY_BA_NS  JITTER_AB_NS LOSS_AB_PPM
//
// Creates both devices and prints "ready". Then it hands every frame that leaves by device A to device B, DELAY_AB_NS
// nanoseconds after it read the frame. Frames from B to A take DELAY_BA_NS. From A to B, a frame takes up to
// JITTER_AB_NS more, evenly distributed, and LOSS_AB_PPM of a million frames are lost. No frame overtakes another, so
// a first-in first-out queue is ordered by time. A packet that the sender's kernel left to be segmented later (up to
// 64 KB, described by a virtio_net_hdr in front of the frame) passes as one piece: otherwise a system call for each
// 1.5 KB frame would be the bottleneck.
//
// Three int64 values on stdin (DELAY_AB_NS JITTER_AB_NS LOSS_AB_PPM) replace those of the command line.
//
// The program ends, and its devices with it, when the process OWNER_PID ends in any way.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    kMaxFrameBytes = 10 + 14 + 65536,  // virtio_net_hdr, Ethernet header, largest IP packet
    kFramesPerTurn = 64,               // read from one side before looking at the other and at the clock
};
static const int64_t kMaxQueuedBytes = (int64_t)1 << 30;  // of one direction; reaching it is a sign of trouble
static const int64_t kNsPerS = 1000000000;

struct frame {
    struct frame* next;
    int64_t due_ns;  // CLOCK_MONOTONIC
    size_t num_bytes;
    unsigned char bytes[];
};

struct direction {
    int from_fd;
    int to_fd;
    int64_t delay_ns;
    int64_t jitter_ns;
    int64_t loss_ppm;
    uint64_t random;  // state of the generator
    int64_t last_due_ns;
    struct frame* head;  // due first
    struct frame* tail;
    int64_t queued_bytes;
};

static void fail(const char* what, const char* which) {
    fprintf(stderr, "delay_line: %s %s: %s\n", what, which, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * kNsPerS + time.tv_nsec;
}

// Creates TAP device `name` in the namespace called `netns`. The device lives as long as the returned descriptor.
static int open_tap(const char* netns, const char* name) {
    char path[4096];
    snprintf(path, sizeof path, "/run/netns/%s", netns);
    int netns_fd = open(path, O_RDONLY | O_CLOEXEC);
    if (netns_fd < 0) fail("cannot open namespace", netns);
    if (setns(netns_fd, CLONE_NEWNET) < 0) fail("cannot enter namespace", netns);
    close(netns_fd);

    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) fail("cannot open", "/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    if (ioctl(fd, TUNSETIFF, &request) < 0) fail("cannot create TAP device", name);
    // Both ends promise to take unsegmented packets, so each may pass them on unchanged.
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) < 0) fail("cannot set offloads of", name);
    return fd;
}

// A frame that the other side does not take (its device is down) is lost, as on a cable.
static void deliver(const struct direction* way, const unsigned char* bytes, size_t num_bytes) {
    while (write(way->to_fd, bytes, num_bytes) < 0 && errno == EINTR) {
    }
}

// The next number of a fixed sequence (xorshift64*), evenly from 0 to `bound` - 1.
static int64_t draw(struct direction* way, int64_t bound) {
    way->random ^= way->random >> 12;
    way->random ^= way->random << 25;
    way->random ^= way->random >> 27;
    return (int64_t)((way->random * 0x2545f4914f6cdd1dULL >> 11) % (uint64_t)bound);
}

static void receive(struct direction* way) {
    static unsigned char buffer[kMaxFrameBytes];
    for (int i = 0; i < kFramesPerTurn; ++i) {
        ssize_t num_bytes = read(way->from_fd, buffer, sizeof buffer);
        if (num_bytes < 0) {
            if (errno == EAGAIN || errno == EINTR) return;
            fail("cannot read from", "a TAP device");  // it was deleted
        }
        if (way->loss_ppm != 0 && draw(way, 1000000) < way->loss_ppm) continue;
        if (way->delay_ns == 0 && way->jitter_ns == 0 && way->head == NULL) {
            deliver(way, buffer, (size_t)num_bytes);
            continue;
        }
        if (way->queued_bytes + num_bytes > kMaxQueuedBytes) {
            static int was_said = 0;
            if (!was_said++) fprintf(stderr, "delay_line: more than 1 GiB under way, frames are lost\n");
            continue;
        }
        struct frame* frame = malloc(sizeof *frame + (size_t)num_bytes);
        if (frame == NULL) fail("no memory for", "a frame");
        frame->next = NULL;
        frame->due_ns = now_ns() + way->delay_ns;
        if (way->jitter_ns != 0) frame->due_ns += draw(way, way->jitter_ns);
        if (frame->due_ns < way->last_due_ns) frame->due_ns = way->last_due_ns;
        way->last_due_ns = frame->due_ns;
        frame->num_bytes = (size_t)num_bytes;
        memcpy(frame->bytes, buffer, (size_t)num_bytes);
        if (way->head == NULL) {
            way->head = frame;
        } else {
            way->tail->next = frame;
        }
        way->tail = frame;
        way->queued_bytes += num_bytes;
    }
}

// Reads new values from stdin and uses them if they are complete. Returns 0 at the end of stdin.
static int take_orders(struct direction* way) {
    int64_t orders[3];
    ssize_t num_bytes = read(STDIN_FILENO, orders, sizeof orders);
    if (num_bytes == (ssize_t)sizeof orders) {
        way->delay_ns = orders[0];
        way->jitter_ns = orders[1];
        way->loss_ppm = orders[2];
    }
    return num_bytes != 0;
}

// Delivers the frames that are due. Returns the time at which the next one is due, or INT64_MAX if there is none.
static int64_t deliver_due(struct direction* way) {
    while (way->head != NULL && way->head->due_ns <= now_ns()) {
        struct frame* frame = way->head;
        way->head = frame->next;
        way->queued_bytes -= (int64_t)frame->num_bytes;
        deliver(way, frame->bytes, frame->num_bytes);
        free(frame);
    }
    return way->head == NULL ? INT64_MAX : way->head->due_ns;
}

// Frames must not wait until the ranks' computations yield a core. This process needs only a small share of a core.
static void run_before_others(void) {
    struct sched_param param = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR, &param) < 0) setpriority(PRIO_PROCESS, 0, -20);
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
}

static int64_t parse_number(const char* text) {
    char* end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (errno != 0 || *end != '\0' || end == text || number < 0) {
        fprintf(stderr, "delay_line: '%s' is no count\n", text);
        exit(2);
    }
    return number;
}

int main(int argc, char** argv) {
    if (argc != 10) {
        fprintf(stderr, "usage: %s OWNER_PID NETNS_A DEVICE_A NETNS_B DEVICE_B", argv[0]);
        fprintf(stderr, " DELAY_AB_NS DELAY_BA_NS JITTER_AB_NS LOSS_AB_PPM\n");
        return 2;
    }
    // 1. Watch the owner. If it has ended already, this process has another parent.
    pid_t owner = (pid_t)parse_number(argv[1]);
    int owner_fd = (int)syscall(SYS_pidfd_open, owner, 0);
    if (owner_fd < 0 || getppid() != owner) fail("cannot watch the owner", argv[1]);

    // 2. Make the two ends.
    int fd_a = open_tap(argv[2], argv[3]);
    int fd_b = open_tap(argv[4], argv[5]);
    struct direction ways[2] = {
        {.from_fd = fd_a, .to_fd = fd_b, .delay_ns = parse_number(argv[6]), .jitter_ns = parse_number(argv[8]),
         .loss_ppm = parse_number(argv[9]), .random = 0x9e3779b97f4a7c15ULL},
        {.from_fd = fd_b, .to_fd = fd_a, .delay_ns = parse_number(argv[7])},
    };
    run_before_others();
    if (puts("ready") == EOF || fflush(stdout) == EOF) return 1;

    // 3. Carry frames.
    struct pollfd polled[4] = {{fd_a, POLLIN, 0}, {fd_b, POLLIN, 0}, {owner_fd, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
    for (;;) {
        int64_t next_ns = INT64_MAX;
        for (int i = 0; i < 2; ++i) {
            int64_t due_ns = deliver_due(&ways[i]);
            if (due_ns < next_ns) next_ns = due_ns;
        }
        int64_t wait_ns = next_ns == INT64_MAX ? 0 : next_ns - now_ns();
        if (wait_ns < 0) wait_ns = 0;
        struct timespec timeout = {.tv_sec = wait_ns / kNsPerS, .tv_nsec = wait_ns % kNsPerS};
        if (ppoll(polled, 4, next_ns == INT64_MAX ? NULL : &timeout, NULL) < 0) {
            if (errno == EINTR) continue;
            fail("cannot wait for", "frames");
        }
        if (polled[2].revents != 0) return 0;
        if (polled[3].revents != 0 && !take_orders(&ways[0])) polled[3].fd = -1;  // no more will come
        for (int i = 0; i < 2; ++i) {
            if (polled[i].revents != 0) receive(&ways[i]);
        }
    }
}
