// Attention of the rows of drafts, first pass, for large groups of query heads: draft_decode by 8x8 matrices. Each
// row's partials equal bit by bit those of grouped_decode for that row alone.
//
// queries      (S, H, D)                       of type T; S rows, those of a draft one after another
// k_pool, v_pool  (num_pages, K, page_size, D)    of type T; int8 and D + 4 where quantised
// page_tables  (S, max_pages) int32            entries past a row's last page may be anything
// partitions   (W, 4) int32                    row, first key, key after the last, unused
// units        (U, ROWS) int32                 partitions that are read together, as in draft_decode
// numbers      (8) float                       factor of the scores, softcap * log2(e) or 0, ...
// after        (8) int32                       the last write's fence: bound, never read
// partials     (W, H, D + 4) float             out: as grouped_decode's
// fence        (8) int32                       out: bound by the next kernel that writes the pools
//
// template: T, D (at most 256), GROUP (H / K), ROWS, PARTS (simdgroups side by side, each with 8 heads of the group),
// BLOCKS (threadgroups that share the group), IS_QUANTISED. One threadgroup per (kv head and block, unit): grid
// (32 * TURNS * PARTS, K * BLOCKS, U). A matrix of keys or values is multiplied for one row after the other; what a
// simdgroup and a lane do is told in grouped_decode.

constexpr int TURNS = PARTS > 2 ? 2 : 4;  // as grouped_decode has
constexpr int KEYS = 16;  // at a time; divides every page size
constexpr int TILES = KEYS / 8;
constexpr int QUADS = D / 16;  // loads of a key: four lanes, four dimensions each
constexpr int WIDTH = D % 32 == 0 ? 4 : 2;  // dimensions of one load of a value
constexpr int BLOCK = 8 * WIDTH;  // of eight lanes
constexpr int LOADS = D / BLOCK;
constexpr int STRIDE = D + 4;  // of a partial
constexpr int ROW = IS_QUANTISED ? D + 4 : D;  // elements of a row in the pools
typedef conditional_t<IS_QUANTISED != 0, char, T> Stored;
typedef vec<Stored, 4> KeyQuad;
typedef vec<Stored, WIDTH> Value;
typedef vec<T, 2> Pair;
typedef simdgroup_matrix<T, 8, 8> Matrix;

threadgroup float highests[PARTS * TURNS * 8];
threadgroup float totals[PARTS * TURNS * 8];
threadgroup float sums[PARTS * TURNS * 8 * BLOCK];

const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int turn = simdgroup % TURNS;
const int part = simdgroup / TURNS;
const int line = matrix_line(lane);
const int column = matrix_column(lane);
const int kv_heads = k_pool_shape[1];
const int kv_head = int(threadgroup_position_in_grid.y) / BLOCKS;
const int block = int(threadgroup_position_in_grid.y) % BLOCKS;
const device int* unit = units + int(threadgroup_position_in_grid.z) * ROWS;
const int page_shift = ctz(k_pool_shape[2]);
const int page_mask = (1 << page_shift) - 1;

// The last row's, which is never none, but in padding. All begin in the same KEYS.
const int last = max(unit[ROWS - 1], 0);
const int first_key = partitions[4 * last + 1];
const int end_key = unit[ROWS - 1] < 0 ? 0 : partitions[4 * last + 2];
const float factor = numbers[0];
const float cap = numbers[1];
const long sequence = partitions[4 * last];
const device int* pages = page_tables + sequence * page_tables_shape[1];

// The heads of this simdgroup, numbered in the group. Those past the group's end repeat its last.
const int first_head = (block * PARTS + part) * 8;
const int one_head = min(first_head + column, GROUP - 1);
const int other_head = min(first_head + column + 1, GROUP - 1);
Matrix query[ROWS][2 * QUADS];
FloatMatrix sum[ROWS][LOADS * WIDTH];
Softmax<FloatPair> softmax[ROWS];
int begin[ROWS], end[ROWS];
#pragma clang loop unroll(full)
for (int r = 0; r < ROWS; r++) {
  // Those that are none repeat the last, and see no key.
  const int listed = unit[r] < 0 ? last : unit[r];
  begin[r] = partitions[4 * listed + 1];
  end[r] = unit[r] < 0 ? 0 : partitions[4 * listed + 2];
  const long source = partitions[4 * listed];
  const device T* rows = queries + (source * kv_heads * GROUP + kv_head * GROUP) * D;
  const device T* one_row = rows + one_head * D;
  const device T* other_row = rows + other_head * D;
  #pragma clang loop unroll(full)
  for (int c = 0; c < 2 * QUADS; c++) {
    const int at = c / 2 * 16 + line / 2 * 4 + c % 2 * 2 + line % 2;
    pair_of(query[r][c]) = Pair(one_row[at], other_row[at]);
  }
  #pragma clang loop unroll(full)
  for (int c = 0; c < LOADS * WIDTH; c++) sum[r][c] = FloatMatrix(0.0f);
  softmax[r].highest = FloatPair(LOWEST);
  softmax[r].total = FloatPair(0.0f);
}

for (int key = (first_key & ~(KEYS - 1)) + KEYS * turn; key < end_key; key += KEYS * TURNS) {
  // KEYS divides every page size: they are on one page.
  const long page = pages[key >> page_shift];
  const long tile = ((page * kv_heads + kv_head) << page_shift) + (key & page_mask);
  FloatMatrix product[ROWS][TILES];
  FloatMatrix weights[ROWS][TILES];
  #pragma clang loop unroll(full)
  for (int k = 0; k < TILES; k++) {
    // Rows past the end hold anything, and so do their scores, which are replaced.
    const device Stored* row =
        (const device Stored*)k_pool + (tile + 8 * k + line) * ROW + column * 2;
    #pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; r++) product[r][k] = FloatMatrix(0.0f);
    #pragma clang loop unroll(full)
    for (int c = 0; c < QUADS; c++) {
      const KeyQuad quad = *(const device KeyQuad*)(row + c * 16);
      Matrix keys, others;
      pair_of(keys) = Pair(T(quad.x), T(quad.y));
      pair_of(others) = Pair(T(quad.z), T(quad.w));
      #pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; r++) {
        simdgroup_multiply_accumulate(product[r][k], keys, query[r][2 * c], product[r][k]);
        simdgroup_multiply_accumulate(product[r][k], others, query[r][2 * c + 1], product[r][k]);
      }
    }
  }
  #pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; r++) {
    // Alone it would not have come so far.
    if (key >= end[r]) continue;
    FloatPair score[TILES];
    FloatPair next = softmax[r].highest;
    #pragma clang loop unroll(full)
    for (int k = 0; k < TILES; k++) {
      const int mine = key + 8 * k + line;
      const bool is_seen = mine >= begin[r] && mine < end[r];
      score[k] = pair_of(product[r][k]) * factor;
      if (IS_QUANTISED) score[k] *= row_scale<D>(k_pool, tile + 8 * k + line);
      score[k] = capped(score[k], cap);
      if (!is_seen) score[k] = FloatPair(LOWEST);
      next = max(next, score[k]);
    }
    softmax[r].rescale(FloatPair(column_max(next.x), column_max(next.y)), sum[r]);
    #pragma clang loop unroll(full)
    for (int k = 0; k < TILES; k++) {
      FloatPair share = softmax[r].weigh(score[k]);
      if (IS_QUANTISED && key + 8 * k + line < end[r]) {
        share *= row_scale<D>(v_pool, tile + 8 * k + line);
      }
      pair_of(weights[r][k]) = share;
    }
  }

  #pragma clang loop unroll(full)
  for (int k = 0; k < TILES; k++) {
    const int one = key + 8 * k + column;
    const device Stored* row =
        (const device Stored*)v_pool + (tile + 8 * k + column) * ROW + line * WIDTH;
    #pragma clang loop unroll(full)
    for (int c = 0; c < LOADS; c++) {
      const Value one_value = *(const device Value*)(row + c * BLOCK);
      const Value other_value = *(const device Value*)(row + ROW + c * BLOCK);
      #pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; r++) {
        if (key >= end[r]) continue;
        #pragma clang loop unroll(full)
        for (int i = 0; i < WIDTH; i++) {
          // Zeros replace values past a row's end, which may be NaN or infinite, and 0 * NaN is NaN.
          FloatMatrix values;
          pair_of(values) = FloatPair(
              one < end[r] ? float(one_value[i]) : 0.0f,
              one + 1 < end[r] ? float(other_value[i]) : 0.0f);
          simdgroup_multiply_accumulate(
              sum[r][c * WIDTH + i], values, weights[r][k], sum[r][c * WIDTH + i]);
        }
      }
    }
  }
}

// Merge the turns' sums of one row after the other, each shrunk to the highest maximum, as many dimensions at a time as
// a load has.
#pragma clang loop unroll(full)
for (int r = 0; r < ROWS; r++) {
  const FloatPair total =
      FloatPair(column_sum(softmax[r].total.x), column_sum(softmax[r].total.y));
  const int state = (part * TURNS + turn) * 8 + column;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // these replace those of the row before
  if (line == 0) {
    highests[state] = softmax[r].highest.x;
    highests[state + 1] = softmax[r].highest.y;
    totals[state] = total.x;
    totals[state + 1] = total.y;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  FloatPair most = softmax[r].highest;
  #pragma clang loop unroll(full)
  for (int t = 0; t < TURNS; t++) {
    const threadgroup float* maximum = highests + (part * TURNS + t) * 8 + column;
    most = max(most, FloatPair(maximum[0], maximum[1]));
  }
  const FloatPair shrink = power_of_2(softmax[r].highest - most);
  threadgroup float* part_sums = sums + part * TURNS * 8 * BLOCK;
  const bool is_row = unit[r] >= 0;
  const long partition = max(unit[r], 0);
  device float* part_partials =
      partials + (partition * kv_heads * GROUP + kv_head * GROUP + first_head) * STRIDE;
  #pragma clang loop unroll(full)
  for (int c = 0; c < LOADS; c++) {
    threadgroup float* mine = part_sums + (turn * 8 + column) * BLOCK + line * WIDTH;
    #pragma clang loop unroll(full)
    for (int i = 0; i < WIDTH; i++) {
      const FloatPair shrunk = pair_of(sum[r][c * WIDTH + i]) * shrink;
      mine[i] = shrunk.x;
      mine[BLOCK + i] = shrunk.y;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = turn * 32 + lane; i < 8 * BLOCK; i += 32 * TURNS) {
      float merged = 0.0f;
      #pragma clang loop unroll(full)
      for (int t = 0; t < TURNS; t++) merged += part_sums[t * 8 * BLOCK + i];
      if (is_row && first_head + i / BLOCK < GROUP) {
        part_partials[i / BLOCK * STRIDE + c * BLOCK + i % BLOCK] = merged;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next dimensions replace these
  }
  if (is_row && turn == 0 && first_head + lane / 4 < GROUP) {
    const threadgroup float* maximum = highests + part * TURNS * 8 + lane / 4;
    const threadgroup float* weights = totals + part * TURNS * 8 + lane / 4;
    float highest_of_all = maximum[0];
    #pragma clang loop unroll(full)
    for (int t = 1; t < TURNS; t++) highest_of_all = max(highest_of_all, maximum[8 * t]);
    float weight = 0.0f;
    #pragma clang loop unroll(full)
    for (int t = 0; t < TURNS; t++) {
      weight += weights[8 * t] * power_of_2(maximum[8 * t] - highest_of_all);
    }
    const int i = lane % 4;
    part_partials[lane / 4 * STRIDE + D + i] = i == 0 ? highest_of_all : i == 1 ? weight : 0.0f;
  }
}

if (thread_index_in_threadgroup < 8 && threadgroup_position_in_grid.y == 0 && threadgroup_position_in_grid.z == 0) {
  fence[thread_index_in_threadgroup] = 0;
}
