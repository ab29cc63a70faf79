// What the kernels that write rows in 8 bits share: a row's scale, as ops.py states the format. Of |x| the bits
// are compared: without a sign they order as the numbers do, NaN after infinity.

static constexpr constant uint SMALLEST = 0x04000000;  // 2^-119, below which a row is zeros
static constexpr constant uint INFINITE = 0x7f800000;  // from here on: infinity, then NaN
static constexpr constant uint NOT_A_NUMBER = 0x7fc00000;

METAL_FUNC uint magnitude(float x) { return as_type<uint>(x) & 0x7fffffffu; }

// `highest` is the largest magnitude of a row.
METAL_FUNC bool has_values(uint highest) { return highest >= SMALLEST && highest < INFINITE; }
METAL_FUNC float scale_of(uint highest) {
  return has_values(highest) ? as_type<float>(highest) / 127.0f : 0.0f;
}
METAL_FUNC uint scale_bits(uint highest) {
  return highest < INFINITE ? as_type<uint>(scale_of(highest)) : NOT_A_NUMBER;
}
