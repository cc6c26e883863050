// The exported page tag check and its portable form.
#include "tags.h"

namespace {

constexpr int ALIGNED = 0x100, NOT_SWAPPED = 0x200;

bool match(const QkTags& call, int64_t r, int64_t n) {
    const int32_t* table = call.table + r * call.table_stride;
    const int32_t* pages = call.pages + r * call.pages_stride;
    const uint64_t* tags = call.tags + r * call.tags_stride;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t page = table[i];
        if (page != pages[i] || page < 0 || page >= call.num_pages || call.pool[page] != tags[i]) return false;
    }
    return true;
}

// An array of numbers of this kind and size, rows contiguous, of `dims` dimensions.
bool is_array(const QkArray* a, int dims, char kind, int item_bytes) {
    if (!a || a->two != 2 || a->dims != dims || a->kind != kind || a->item_bytes != item_bytes) return false;
    if ((a->flags & (ALIGNED | NOT_SWAPPED)) != (ALIGNED | NOT_SWAPPED)) return false;
    for (int i = 0; i < dims; ++i)
        if (a->shape[i] == 0) return true;
    if (a->shape[dims - 1] > 1 && a->strides[dims - 1] != item_bytes) return false;
    return dims == 1 || a->shape[0] == 1 || a->strides[0] % item_bytes == 0;
}

bool is_table(const QkArray* a, const QkArray* like, char kind, int item_bytes) {
    return is_array(a, 2, kind, item_bytes) && a->shape[0] == like->shape[0] && a->shape[1] == like->shape[1];
}

}  // namespace

// result: bytes for the requests. QK_BAD_ARGUMENT if an array is not what tags.py asks for; nothing is read then.
QK_EXPORT int qk_check_page_tags(int isa, const QkArray* table, const QkArray* pages, const QkArray* tags,
                                 const QkArray* pool, const QkArray* counts, uint8_t* result, int64_t requests) {
    if (!is_array(table, 2, 'i', 4) || !is_table(pages, table, 'i', 4) || !is_table(tags, table, 'u', 8) ||
        !is_array(pool, 1, 'u', 8) || !is_array(counts, 1, 'i', 4) || counts->shape[0] != requests ||
        table->shape[0] != requests)
        return QK_BAD_ARGUMENT;
    const QkTags call{static_cast<const int32_t*>(table->data),  table->strides[0] / 4,
                      static_cast<const int32_t*>(pages->data),  pages->strides[0] / 4,
                      static_cast<const uint64_t*>(tags->data),  tags->strides[0] / 8,
                      static_cast<const uint64_t*>(pool->data),  pool->shape[0]};
    const QkTagsMatch wide = isa >= QK_AVX512 ? qk_tags_match_avx512() : nullptr;
    for (int64_t r = 0; r < requests; ++r) {
        const int64_t n = static_cast<const int32_t*>(counts->data)[r];
        result[r] = n >= 0 && n <= table->shape[1] && (wide ? wide : match)(call, r, n);
    }
    return QK_OK;
}
