// Which experts a token goes to: scores, the best of the eligible ones, their weights.
//
// A handful of torch operations on a few hundred numbers cost more than the numbers. Plain loops for every
// processor: there is nothing here that wider vectors would shorten. A row's bits depend on nothing but the row.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "quantkit_kernels.h"
#include "runtime.h"

// All members are eight bytes wide: Python passes an array of integers.
struct QkRoute {
    const float* logits;  // [tokens, experts]
    int64_t stride, tokens, experts;
    const float* correction;  // [experts], added for the choice only, or null
    int64_t top;
    int64_t groups, top_groups;  // only experts of the best groups are eligible
    int64_t is_softmax;          // else sigmoid
    int64_t normalizes;
    double epsilon, scaling;
    int64_t* ids;    // [tokens, top], best first
    float* weights;  // [tokens, top]
};

namespace {

constexpr int64_t TASK = 32768;  // comparisons

// e^x within 2^-22, 0 below -87; NaN for NaN.
inline float exponential(float x) {
    const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
    const float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float n = (bounded * 1.44269504f + rounder) - rounder;
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const int32_t exponent = (int32_t(n == n ? n : 0.0f) + 127) << 23;
    float power;
    memcpy(&power, &exponent, 4);
    return x < -87.0f ? 0.0f : p * power;
}

// NaN ranks highest, as in torch: a corrupt score gets in and its damage shows.
inline bool is_better(float a, float b) { return a > b || (a != a && b == b); }

void scores_of(const float* logits, int64_t n, bool is_softmax, float* scores) {
    if (!is_softmax) {
        for (int64_t i = 0; i < n; ++i) scores[i] = 1.0f / (1.0f + exponential(-logits[i]));
        return;
    }
    float most = logits[0], sum = 0;
    for (int64_t i = 1; i < n; ++i) most = is_better(logits[i], most) ? logits[i] : most;
    for (int64_t i = 0; i < n; ++i) scores[i] = exponential(logits[i] - most);
    for (int64_t i = 0; i < n; ++i) sum += scores[i];
    for (int64_t i = 0; i < n; ++i) scores[i] = scores[i] / sum;
}

// The best of n that are not taken yet, of equals the lower; it is taken then.
int64_t take_best(const float* x, int64_t n, bool* taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i)
        if (!taken[i] && (best < 0 || is_better(x[i], x[best]))) best = i;
    taken[best] = true;
    return best;
}

// Takes the experts of all but the best groups; a group is as good as the sum of its two best.
void close_groups(const QkRoute& call, const float* choice, float* sums, bool* closed, bool* taken) {
    const int64_t size = call.experts / call.groups;
    for (int64_t g = 0; g < call.groups; ++g) {
        const float* own = choice + g * size;
        float first = own[0], second = -INFINITY;
        for (int64_t i = 1; i < size; ++i) {
            if (is_better(own[i], first))
                second = first, first = own[i];
            else if (is_better(own[i], second))
                second = own[i];
        }
        sums[g] = first + second;
        closed[g] = false;
    }
    for (int64_t k = 0; k < call.top_groups; ++k) take_best(sums, call.groups, closed);
    for (int64_t i = 0; i < call.experts; ++i) taken[i] = !closed[i / size];
}

void route(const QkRoute& call, int64_t t, float* numbers, bool* flags) {
    const int64_t n = call.experts, k = call.top;
    float *scores = numbers, *choice = scores + n;
    bool* taken = flags;
    int64_t* ids = call.ids + t * k;
    float* weights = call.weights + t * k;
    scores_of(call.logits + t * call.stride, n, call.is_softmax, scores);
    for (int64_t i = 0; i < n; ++i) choice[i] = call.correction ? scores[i] + call.correction[i] : scores[i];
    memset(taken, 0, size_t(n) * sizeof *taken);
    if (call.groups > 1) close_groups(call, choice, choice + n, taken + n, taken);
    float sum = 0;
    for (int64_t i = 0; i < k; ++i) ids[i] = take_best(choice, n, taken);
    for (int64_t i = 0; i < k; ++i) weights[i] = scores[ids[i]], sum += weights[i];
    const float by = sum + float(call.epsilon), scaling = float(call.scaling);
    for (int64_t i = 0; i < k; ++i) weights[i] = (call.normalizes ? weights[i] / by : weights[i]) * scaling;
}

}  // namespace

QK_EXPORT int qk_route(int, const QkRoute* call, int threads) {
    const int64_t numbers = 2 * call->experts + call->groups, flags = call->experts + call->groups;
    const size_t stride = (size_t(numbers) * sizeof(float) + size_t(flags) * sizeof(bool) + 63) / 64 * 64;
    char* memory = static_cast<char*>(malloc(stride * size_t(threads < 1 ? 1 : threads)));
    if (!memory) return QK_NO_MEMORY;
    const int64_t each = call->experts * call->top, chunk = each < TASK ? TASK / each : 1;
    qk_for_each_on(threads, call->tokens, chunk, [&](int64_t t, int thread) {
        float* own = reinterpret_cast<float*>(memory + size_t(thread) * stride);
        route(*call, t, own, reinterpret_cast<bool*>(own + numbers));
    });
    free(memory);
    return QK_OK;
}
