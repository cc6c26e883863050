// SHA-256 (FIPS 180-4) of one or two streams at once, by the SHA extensions of x86.
//
// A round waits for the one before it, so that one stream leaves half of the unit idle; a second stream beside it
// costs next to nothing. A conversion always has two: a file and the tensors in it. Without the extensions nothing
// here runs (qk_sha256_available): quantkit_kernels/digest.py takes hashlib then.
#include <stdint.h>
#include <string.h>

#include "quantkit_kernels.h"

extern "C" struct QkSha256 {
    uint32_t state[8];
    uint64_t count;  // bytes taken so far; the last count % 64 of them are in `rest`
    uint8_t rest[64];
};

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

namespace {

#define QK_SHA __attribute__((target("sha,sse4.1,ssse3")))

constexpr uint32_t INITIAL[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
alignas(16) constexpr uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The state in the order of the instructions: A B E F and C D G H, highest lane first.
struct Registers {
    __m128i abef, cdgh;
};

QK_SHA inline Registers from_state(const uint32_t* state) {
    const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
    const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
    const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    return {_mm_alignr_epi8(cdab, efgh, 8), _mm_blend_epi16(efgh, cdab, 0xf0)};
}

QK_SHA inline void to_state(const Registers& r, uint32_t* state) {
    const __m128i feba = _mm_shuffle_epi32(r.abef, 0x1b), dchg = _mm_shuffle_epi32(r.cdgh, 0xb1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

// `blocks` blocks of 64 bytes of N streams, their rounds interleaved.
template <int N>
QK_SHA void compress(uint32_t* const* states, const uint8_t* const* data, int64_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    Registers now[N];
    for (int s = 0; s < N; ++s) now[s] = from_state(states[s]);
    for (int64_t block = 0; block < blocks; ++block) {
        Registers before[N];
        __m128i words[N][4];  // the last sixteen of the message schedule
        for (int s = 0; s < N; ++s) before[s] = now[s];
#pragma GCC unroll 16
        for (int step = 0; step < 16; ++step) {  // four rounds
#pragma GCC unroll 2
            for (int s = 0; s < N; ++s) {
                __m128i& w = words[s][step % 4];
                if (step < 4) {
                    const uint8_t* at = data[s] + block * 64 + step * 16;
                    w = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)), big_endian);
                } else {
                    const __m128i& w3 = words[s][(step + 3) % 4];
                    const __m128i middle = _mm_alignr_epi8(w3, words[s][(step + 2) % 4], 4);
                    w = _mm_sha256msg1_epu32(w, words[s][(step + 1) % 4]);
                    w = _mm_sha256msg2_epu32(_mm_add_epi32(w, middle), w3);
                }
                const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(K + step * 4));
                const __m128i wk = _mm_add_epi32(w, k);
                now[s].cdgh = _mm_sha256rnds2_epu32(now[s].cdgh, now[s].abef, wk);
                now[s].abef = _mm_sha256rnds2_epu32(now[s].abef, now[s].cdgh, _mm_shuffle_epi32(wk, 0x0e));
            }
        }
        for (int s = 0; s < N; ++s) {
            now[s].abef = _mm_add_epi32(now[s].abef, before[s].abef);
            now[s].cdgh = _mm_add_epi32(now[s].cdgh, before[s].cdgh);
        }
    }
    for (int s = 0; s < N; ++s) to_state(now[s], states[s]);
}

void compress_one(QkSha256* sha, const uint8_t* data, int64_t blocks) {
    uint32_t* const states[1] = {sha->state};
    const uint8_t* const from[1] = {data};
    compress<1>(states, from, blocks);
}

// What is left of data after the begun block was filled; whole blocks of it may then be compressed in place.
struct Left {
    const uint8_t* data;
    int64_t count;
};

Left fill(QkSha256* sha, const uint8_t* data, int64_t count) {
    const int64_t begun = int64_t(sha->count % 64);
    sha->count += uint64_t(count);
    if (begun == 0) return {data, count};
    const int64_t taken = count < 64 - begun ? count : 64 - begun;
    if (taken) memcpy(sha->rest + begun, data, size_t(taken));
    if (begun + taken == 64) compress_one(sha, sha->rest, 1);
    return {data + taken, count - taken};
}

void take_rest(QkSha256* sha, Left left) {
    const int64_t blocks = left.count / 64, rest = left.count % 64;
    if (blocks) compress_one(sha, left.data, blocks);
    if (rest) memcpy(sha->rest, left.data + blocks * 64, size_t(rest));
}

}  // namespace

QK_EXPORT int qk_sha256_available() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 9 & 1) || !(c >> 19 & 1)) return 0;  // SSSE3, SSE4.1
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

QK_EXPORT void qk_sha256_start(QkSha256* sha) {
    memcpy(sha->state, INITIAL, sizeof INITIAL);
    sha->count = 0;
}

// Two different streams take their data at once; either may take none.
QK_EXPORT void qk_sha256_update(QkSha256* a, const uint8_t* data_a, int64_t count_a, QkSha256* b, const uint8_t* data_b,
                                int64_t count_b) {
    Left left_a = fill(a, data_a, count_a), left_b = b ? fill(b, data_b, count_b) : Left{nullptr, 0};
    const int64_t blocks = (left_a.count < left_b.count ? left_a.count : left_b.count) / 64;
    if (blocks) {
        uint32_t* const states[2] = {a->state, b->state};
        const uint8_t* const data[2] = {left_a.data, left_b.data};
        compress<2>(states, data, blocks);
        left_a = {left_a.data + blocks * 64, left_a.count - blocks * 64};
        left_b = {left_b.data + blocks * 64, left_b.count - blocks * 64};
    }
    take_rest(a, left_a);
    if (b) take_rest(b, left_b);
}

// The digest of what was taken so far; the stream may go on.
QK_EXPORT void qk_sha256_digest(const QkSha256* sha, uint8_t* out) {
    QkSha256 last = *sha;
    const uint64_t bits = last.count * 8;
    uint8_t padding[72] = {0x80};
    const int64_t zeros = int64_t((119 - last.count % 64) % 64);  // after the one bit, up to 8 bytes before a block's end
    for (int i = 0; i < 8; ++i) padding[1 + zeros + i] = uint8_t(bits >> (56 - 8 * i));
    take_rest(&last, fill(&last, padding, 9 + zeros));
    for (int i = 0; i < 32; ++i) out[i] = uint8_t(last.state[i / 4] >> (24 - 8 * (i % 4)));
}

#else

QK_EXPORT int qk_sha256_available() { return 0; }
QK_EXPORT void qk_sha256_start(QkSha256*) {}
QK_EXPORT void qk_sha256_update(QkSha256*, const uint8_t*, int64_t, QkSha256*, const uint8_t*, int64_t) {}
QK_EXPORT void qk_sha256_digest(const QkSha256*, uint8_t*) {}

#endif
