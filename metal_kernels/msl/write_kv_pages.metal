// Writes whole pages: the reason for page-aligned chunks. One page number serves
// page_size rows, and every store is a word of a contiguous tile: of 16 bytes, or of 4 where the rows are
// quantised ones (from the disk cache).
//
// keys, values    (T, K, D), (T, K, E)             of type T
// moves           (M, 2) int32                     first row, page; pages all different
// k_pool, v_pool  (num_pages, K, page_size, D | E)  written in place
// after_a/b       (8) int32                        bound for their order, never read
// fence           (8) int32                        out: bound by the next kernel that reads the pools
//
// template: T, D, E. One threadgroup per (page, head): grid (threads, K, M).

constexpr bool IS_LONG = D * sizeof(T) % 16 == 0;
typedef conditional_t<IS_LONG, uint4, uint> Word;
constexpr int KEY_WORDS = D * sizeof(T) / sizeof(Word);
constexpr int VALUE_WORDS = E * sizeof(T) / sizeof(Word);
const int thread_index = int(thread_position_in_threadgroup.x);
const int num_threads = int(threads_per_threadgroup.x);
const int head = int(threadgroup_position_in_grid.y);
const int move = int(threadgroup_position_in_grid.z);
const int kv_heads = k_pool_shape[1];
const int page_size = k_pool_shape[2];

const int first_row = moves[2 * move];
const int page = moves[2 * move + 1];
const ulong tile = (ulong(page) * kv_heads + head) * page_size;
for (int i = thread_index; i < page_size * KEY_WORDS; i += num_threads) {
  const ulong row = ulong(first_row + i / KEY_WORDS) * kv_heads + head;
  ((device Word*)k_pool)[tile * KEY_WORDS + i] =
      ((const device Word*)keys)[row * KEY_WORDS + i % KEY_WORDS];
}
for (int i = thread_index; i < page_size * VALUE_WORDS; i += num_threads) {
  const ulong row = ulong(first_row + i / VALUE_WORDS) * kv_heads + head;
  ((device Word*)v_pool)[tile * VALUE_WORDS + i] =
      ((const device Word*)values)[row * VALUE_WORDS + i % VALUE_WORDS];
}

if (thread_index < 8 && head == 0 && move == 0) fence[thread_index] = 0;
