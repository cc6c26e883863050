// A known floating-point environment for the length of a scope: round to nearest, no flush to zero, whatever
// another library left in this thread's control register.
#ifndef QK_ENVIRONMENT_H
#define QK_ENVIRONMENT_H

#include <stdint.h>
#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace {

class FloatEnvironment {
#if defined(__x86_64__) || defined(__i386__)
    unsigned saved_ = _mm_getcsr();

public:
    FloatEnvironment() { _mm_setcsr(0x1f80); }
    ~FloatEnvironment() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
    uint64_t saved_;

public:
    FloatEnvironment() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t(0)) : "memory");
    }
    ~FloatEnvironment() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_) : "memory"); }
#else
public:
    FloatEnvironment() {}
    ~FloatEnvironment() {}
#endif
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};

}  // namespace

#endif
