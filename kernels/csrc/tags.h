// C ABI of the page tag check, quantkit_kernels/tags.py.
#ifndef QK_TAGS_H
#define QK_TAGS_H

#include "quantkit_kernels.h"

// numpy's array interface in C (PyArrayInterface, "The array interface protocol", version 3): what the attribute
// __array_struct__ of an array points to. Reading it here costs a tenth of asking for addresses in Python.
struct QkArray {
    int two;
    int dims;
    char kind;
    int item_bytes;
    int flags;
    const intptr_t* shape;
    const intptr_t* strides;  // bytes
    void* data;
    void* description;
};

struct QkTags {  // strides in elements
    const int32_t* table;  // [requests, entries]
    int64_t table_stride;
    const int32_t* pages;  // [requests, entries], expected
    int64_t pages_stride;
    const uint64_t* tags;  // [requests, entries], expected
    int64_t tags_stride;
    const uint64_t* pool;  // [num_pages]
    int64_t num_pages;
};

// Whether the first n entries of request r are what is expected; pages outside the pool are not, and are not read.
typedef bool (*QkTagsMatch)(const QkTags& call, int64_t r, int64_t n);

extern "C" QkTagsMatch qk_tags_match_avx512();  // null where this build does not hold it

#endif
