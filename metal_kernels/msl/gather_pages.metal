// Copies a sequence's pages side by side, for attention that reads contiguous keys and values.
//
// k_pool, v_pool  (num_pages, K, page_size, D)     of type T
// pages           (N) int32                        in the order of the positions
// after           (8) int32                        bound for its order, never read
// keys, values    (1, K, N * page_size, D)         out
// fence           (8) int32                        out: bound by the next kernel that writes the pools
//
// template: T, D. One threadgroup per (page, head): grid (threads, K, N).

constexpr int WORDS = D * sizeof(T) / 16;
const int thread_index = int(thread_position_in_threadgroup.x);
const int num_threads = int(threads_per_threadgroup.x);
const int head = int(threadgroup_position_in_grid.y);
const int place = int(threadgroup_position_in_grid.z);
const int num_places = int(threadgroups_per_grid.z);
const int kv_heads = k_pool_shape[1];
const int num_words = k_pool_shape[2] * WORDS;

const ulong source = (ulong(pages[place]) * kv_heads + head) * num_words;
const ulong target = (ulong(head) * num_places + place) * num_words;
for (int i = thread_index; i < num_words; i += num_threads) {
  ((device uint4*)keys)[target + i] = ((const device uint4*)k_pool)[source + i];
  ((device uint4*)values)[target + i] = ((const device uint4*)v_pool)[source + i];
}

if (thread_index < 8 && head == 0 && place == 0) fence[thread_index] = 0;
