#include "rows_impl.h"

extern "C" const QkRowOps* qk_rows_portable() { return &OPS; }
