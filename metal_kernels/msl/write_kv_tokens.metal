// Writes rows into single slots: decodes, and the rows of a chunk outside whole pages.
//
// keys, values    (T, K, D), (T, K, E)             of type T
// moves           (M, 2) int32                     row, slot; slots all different
// k_pool, v_pool  (num_pages, K, page_size, D | E)  written in place
// after_a/b       (8) int32                        bound for their order, never read
// fence           (8) int32                        out: bound by the next kernel that reads the pools
//
// template: T, D, E <= D. grid: (words of a row of keys, K, M), one word of keys and values per thread:
// 16 bytes, or 4 where the rows are quantised ones (from the disk cache).
// Bits are moved as integers, so NaN payloads survive.

constexpr bool IS_LONG = D * sizeof(T) % 16 == 0;
typedef conditional_t<IS_LONG, uint4, uint> Word;
constexpr int KEY_WORDS = D * sizeof(T) / sizeof(Word);
constexpr int VALUE_WORDS = E * sizeof(T) / sizeof(Word);
const int word = int(thread_position_in_grid.x);
const int head = int(thread_position_in_grid.y);
const int move = int(thread_position_in_grid.z);
const int kv_heads = k_pool_shape[1];
const int page_shift = ctz(k_pool_shape[2]);

const int row = moves[2 * move];
const int slot = moves[2 * move + 1];
const int page = slot >> page_shift;
const int offset = slot & ((1 << page_shift) - 1);
const ulong source = ulong(row) * kv_heads + head;
const ulong target = ((ulong(page) * kv_heads + head) << page_shift) + offset;
((device Word*)k_pool)[target * KEY_WORDS + word] =
    ((const device Word*)keys)[source * KEY_WORDS + word];
if (word < VALUE_WORDS) {
  ((device Word*)v_pool)[target * VALUE_WORDS + word] =
      ((const device Word*)values)[source * VALUE_WORDS + word];
}

// A row has at least 8 words.
if (word < 8 && head == 0 && move == 0) fence[word] = 0;
