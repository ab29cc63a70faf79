// Copies what a chunk sees of its sequence's pages side by side, for attention that reads contiguous keys
// and values.
//
// k_pool, v_pool  (num_pages, K, page_size, D)     of type T; int8 and D + 4 where quantised
// pages           (3 + N) int32                    position in the first page that the copies begin with, how
//                                                  many are seen, and how many there is room for (P); then the
//                                                  pages, in their order
// after           (8) int32                        bound for its order, never read
// keys, values    (1, K, P, D)                     out, of type T; what is not seen stays unwritten
// fence           (8) int32                        out: bound by the next kernel that writes the pools
//
// template: T, D, IS_QUANTISED. One threadgroup per (page, head): grid (threads, K, N).

constexpr int WORDS = D * sizeof(T) / 16;
constexpr int QUADS = D / 4;
typedef vec<T, 4> Quad;
const int thread_index = int(thread_position_in_threadgroup.x);
const int num_threads = int(threads_per_threadgroup.x);
const int head = int(threadgroup_position_in_grid.y);
const int place = int(threadgroup_position_in_grid.z);
const int kv_heads = k_pool_shape[1];
const int page_size = k_pool_shape[2];
// Rows of the pool and of the copies. What is seen of the page: its rows from `first` to before `end`.
const int skipped = pages[0];
const int seen = pages[1];
const int room = pages[2];
const int first = place == 0 ? skipped : 0;
const int end = min(page_size, skipped + seen - place * page_size);
const ulong source = (ulong(pages[3 + place]) * kv_heads + head) * page_size;
const ulong target = ulong(head) * room + place * page_size + first - skipped;

if (IS_QUANTISED) {
  for (int i = thread_index; i < (end - first) * QUADS; i += num_threads) {
    const ulong at = source + first + i / QUADS;
    ((device Quad*)keys)[target * QUADS + i] = row_quad<T, D, 1>(k_pool, at, i % QUADS);
    ((device Quad*)values)[target * QUADS + i] = row_quad<T, D, 1>(v_pool, at, i % QUADS);
  }
} else {
  for (int i = thread_index; i < (end - first) * WORDS; i += num_threads) {
    ((device uint4*)keys)[target * WORDS + i] =
        ((const device uint4*)k_pool)[(source + first) * WORDS + i];
    ((device uint4*)values)[target * WORDS + i] =
        ((const device uint4*)v_pool)[(source + first) * WORDS + i];
  }
}

if (thread_index < 8 && head == 0 && place == 0) fence[thread_index] = 0;
