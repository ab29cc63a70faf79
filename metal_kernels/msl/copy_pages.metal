// Copies pages within the pools: the tail that a sequence is about to write and others still read.
//
// moves           (M, 2) int32                     source, target; no target is a source
// k_pool, v_pool  (num_pages, K, page_size, D | E)  of type T, written in place
// after_a/b       (8) int32                        bound for their order, never read
// fence           (8) int32                        out: bound by the next kernel that reads the pools
//
// template: T, D, E. One threadgroup per (page, head): grid (threads, K, M).

constexpr int KEY_WORDS = D * sizeof(T) / 16;
constexpr int VALUE_WORDS = E * sizeof(T) / 16;
const int thread_index = int(thread_position_in_threadgroup.x);
const int num_threads = int(threads_per_threadgroup.x);
const int head = int(threadgroup_position_in_grid.y);
const int move = int(threadgroup_position_in_grid.z);
const int kv_heads = k_pool_shape[1];
const int page_size = k_pool_shape[2];

const ulong source = (ulong(moves[2 * move]) * kv_heads + head) * page_size;
const ulong target = (ulong(moves[2 * move + 1]) * kv_heads + head) * page_size;
for (int i = thread_index; i < page_size * KEY_WORDS; i += num_threads) {
  ((device uint4*)k_pool)[target * KEY_WORDS + i] =
      ((const device uint4*)k_pool)[source * KEY_WORDS + i];
}
for (int i = thread_index; i < page_size * VALUE_WORDS; i += num_threads) {
  ((device uint4*)v_pool)[target * VALUE_WORDS + i] =
      ((const device uint4*)v_pool)[source * VALUE_WORDS + i];
}

if (thread_index < 8 && head == 0 && move == 0) fence[thread_index] = 0;
