// Copies pages within the pools: the tail that a sequence is about to write and others still read.
//
// moves           (M, 2) int32                     source, target; no target is a source
// k_pool, v_pool  (num_pages, K, page_size, D | E)  of type T, written in place; quantised rows included
// after_a/b       (8) int32                        bound for their order, never read
// fence           (8) int32                        out: bound by the next kernel that reads the pools
//
// template: T, D, E. One threadgroup per (page, head): grid (threads, K, M).

constexpr int KEY_BYTES = D * int(sizeof(T));  // of a row
constexpr int VALUE_BYTES = E * int(sizeof(T));
const int thread_index = int(thread_position_in_threadgroup.x);
const int num_threads = int(threads_per_threadgroup.x);
const int head = int(threadgroup_position_in_grid.y);
const int move = int(threadgroup_position_in_grid.z);
const int kv_heads = k_pool_shape[1];
// 16-byte words of a tile: a multiple of 16 rows has a whole number of them, whatever a row has.
const int key_label = k_pool_shape[2] * KEY_BYTES / 16;
const int value_words = k_pool_shape[2] * VALUE_BYTES / 16;

const ulong source = ulong(moves[2 * move]) * kv_heads + head;
const ulong target = ulong(moves[2 * move + 1]) * kv_heads + head;
for (int i = thread_index; i < key_label; i += num_threads) {
  ((device uint4*)k_pool)[target * key_label + i] =
      ((const device uint4*)k_pool)[source * key_label + i];
}
for (int i = thread_index; i < value_words; i += num_threads) {
  ((device uint4*)v_pool)[target * value_words + i] =
      ((const device uint4*)v_pool)[source * value_words + i];
}

if (thread_index < 8 && head == 0 && move == 0) fence[thread_index] = 0;
