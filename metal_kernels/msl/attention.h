// What the kernels of attention share: where a lane's elements of an 8x8 matrix are, the step of an online softmax,
// and loads of a row of the pools. MLX compiles it before a kernel's function, whose template it does not see.

static constexpr constant float LOWEST = -1e30f;  // for minus infinity, which fast math may not support
static constexpr constant float LOG2_E = 1.44269504088896340736f;
typedef vec<float, 2> FloatPair;
typedef simdgroup_matrix<float, 8, 8> FloatMatrix;

// A lane holds two neighbours of a matrix, (line, column) and (line, column + 1). MLX's own kernels rely on which.
METAL_FUNC int matrix_line(int lane) { return ((lane >> 2) & 4) + ((lane >> 1) & 3); }
METAL_FUNC int matrix_column(int lane) { return ((lane >> 1) & 4) + (lane & 1) * 2; }

template <typename T>
METAL_FUNC thread vec<T, 2>& pair_of(thread simdgroup_matrix<T, 8, 8>& matrix) {
  return reinterpret_cast<thread vec<T, 2>&>(matrix.thread_elements());
}

// The four lanes of a line differ in bits 1 and 8, the eight of a pair of columns in 2, 4 and 16.
METAL_FUNC float line_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}

METAL_FUNC float line_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

METAL_FUNC float column_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(2)));
  x = max(x, simd_shuffle_xor(x, ushort(4)));
  return max(x, simd_shuffle_xor(x, ushort(16)));
}

METAL_FUNC float column_sum(float x) {
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  return x + simd_shuffle_xor(x, ushort(16));
}

METAL_FUNC float capped(float score, float cap) {
  if (cap > 0.0f) score = precise::tanh(score) * cap;
  return score;
}

METAL_FUNC FloatPair capped(FloatPair score, float cap) {
  if (cap > 0.0f) score = FloatPair(precise::tanh(score.x), precise::tanh(score.y)) * cap;
  return score;
}

METAL_FUNC float power_of_2(float x) { return fast::exp2(x); }
METAL_FUNC FloatPair power_of_2(FloatPair x) { return FloatPair(fast::exp2(x.x), fast::exp2(x.y)); }

METAL_FUNC bool exceeds(float x, float y) { return x > y; }
METAL_FUNC bool exceeds(FloatPair x, FloatPair y) { return x.x > y.x || x.y > y.y; }

// Online softmax: weights are 2^(score - highest). A lane's scores belong to one row (State is float), or to two
// neighbouring columns of a matrix (FloatPair). A new maximum is that of all lanes of the row. A lane's total is that
// of its own scores; lanes are added after the last key.
template <typename State>
struct Softmax {
  State highest;
  State total;

  // Returns the factor of the sums so far.
  METAL_FUNC State raise(State next) {
    const State shrink = power_of_2(highest - next);
    highest = next;
    total *= shrink;
    return shrink;
  }

  // The sums shrink only where a lane's maximum grew.
  template <int N>
  METAL_FUNC void rescale(State next, thread FloatMatrix (&sums)[N]) {
    if (simd_any(exceeds(next, highest))) {
      const State shrink = raise(next);
      #pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) pair_of(sums[i]) *= shrink;
    }
  }

  METAL_FUNC State weigh(State score) {
    const State weight = power_of_2(score - highest);
    total += weight;
    return weight;
  }

  // Of two scores of one row.
  METAL_FUNC FloatPair weigh_both(FloatPair scores) {
    const FloatPair weights = power_of_2(scores - highest);
    total += weights.x + weights.y;
    return weights;
  }
};

// A quantised row is D values, then their scale.
template <int D, typename P>
METAL_FUNC float row_scale(const device P* pool, long row) {
  return *(const device float*)((const device char*)pool + row * (D + 4) + D);
}

// Four neighbouring dimensions of a row of the pools, dequantised.
template <typename T, int D, int IS_QUANTISED, typename P>
METAL_FUNC vec<T, 4> row_quad(const device P* pool, long row, int quad) {
  typedef vec<T, 4> Quad;
  if (!IS_QUANTISED) return ((const device Quad*)(pool + row * D))[quad];
  const device char4* values = (const device char4*)((const device char*)pool + row * (D + 4));
  const float4 x = float4(values[quad]) * row_scale<D>(pool, row);
  return Quad(T(x.x), T(x.y), T(x.z), T(x.w));
}
