// The reduction of numbers of several ranks, in rank order.
//
// Note [16 bits]: bfloat16 and float16 are added in float32, over all ranks, and the sum is rounded once. A mean is that
// sum, divided and rounded again, as on transports that return sums.
#include "arithmetic.h"

#include <ATen/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define FOR_AVX2 __attribute__((target("avx2,f16c")))
#define INLINED_FOR_AVX2 __attribute__((target("avx2,f16c"), always_inline)) inline
#endif

namespace {

// Up to this size a call of torch's kernels takes longer than the sum.
constexpr int64_t kSmallBytes = 1 << 11;

at::Tensor values_at(const char* data, int64_t nbytes, at::ScalarType dtype) {
  const int64_t count = nbytes / static_cast<int64_t>(c10::elementSize(dtype));
  return at::from_blob(const_cast<char*>(data), {count}, at::TensorOptions().dtype(dtype));
}

// By torch's own kernels, so that all backends round alike, and NaN is the minimum and maximum of NaN and a number.
void reduce_two(Op op, char* out, const char* a, const char* b, int64_t nbytes, at::ScalarType dtype) {
  auto result = values_at(out, nbytes, dtype);
  const auto first = values_at(a, nbytes, dtype), second = values_at(b, nbytes, dtype);
  switch (op) {
    case Op::sum:
    case Op::mean: at::add_out(result, first, second); break;
    case Op::product: at::mul_out(result, first, second); break;
    case Op::min: at::minimum_out(result, first, second); break;
    case Op::max: at::maximum_out(result, first, second); break;
  }
}

// As dualdist.collectives.reductions.divide_, with the same bits.
void divide(char* total, int64_t nbytes, at::ScalarType dtype, int64_t divisor) {
  auto values = values_at(total, nbytes, dtype);
  if ((divisor & (divisor - 1)) == 0) {
    values.mul_(1.0 / static_cast<double>(divisor));
  } else {
    values.div_(divisor);
  }
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr uint32_t kSign = 0x80000000, kInfinity = 0x7f800000;

// Conversions of 16-bit formats; narrow() rounds to the nearest, and halfway to the even one.
struct BFloat16 {
  using Stored = uint16_t;
  using Wide = float;

  static float widen(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

  static uint16_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    return (bits & ~kSign) > kInfinity ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }

#if defined(__x86_64__)
  INLINED_FOR_AVX2 static __m256 widen_8(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }

  // NaN of such numbers has no bit set in its lower half, so that rounding leaves it as it is.
  INLINED_FOR_AVX2 static __m256i rounded(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values), one = _mm256_set1_epi32(1), half = _mm256_set1_epi32(0x7fff);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, half), odd), 16);
  }

  INLINED_FOR_AVX2 static __m256 round_8(__m256 values) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(rounded(values), 16));
  }

  INLINED_FOR_AVX2 static __m256i narrow_16(__m256 low, __m256 high) {
    // Packs the halves of both in turn, so that the middle two quarters change places.
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(low), rounded(high)), 0b11011000);
  }
#endif
};

struct Float16 {
  using Stored = uint16_t;
  using Wide = float;

  static constexpr uint32_t kBias = 112u << 23;      // between the exponents of both formats
  static constexpr uint32_t kNormal = 113u << 23;    // 2^-14, the smallest number that is not subnormal
  static constexpr uint32_t kOverflow = 0x477ff000;  // 65520, halfway between the largest number and 2^16

  static float widen(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    if (magnitude < 0x400) return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
    return float_of(sign | ((magnitude << 13) + kBias + (magnitude >= 0x7c00 ? kBias : 0)));
  }

  static uint16_t narrow(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & ~kSign;
    if (magnitude >= kOverflow) return sign | (magnitude > kInfinity ? 0x7e00 : 0x7c00);
    if (magnitude < kNormal) return sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));  // in units of 2^-24
    return sign | ((magnitude - kBias + 0xfff + (magnitude >> 13 & 1)) >> 13);
  }

#if defined(__x86_64__)
  INLINED_FOR_AVX2 static __m256 widen_8(__m128i bits) { return _mm256_cvtph_ps(bits); }

  INLINED_FOR_AVX2 static __m256 round_8(__m256 values) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  }

  INLINED_FOR_AVX2 static __m256i narrow_16(__m256 low, __m256 high) {
    return _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
};

// What reduces two numbers; NaN is the minimum and maximum of NaN and a number.
struct Sum {
  template <typename T>
  static T of(T a, T b) {
    return a + b;
  }
#if defined(__x86_64__)
  INLINED_FOR_AVX2 static __m256 of_8(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
#endif
};

struct Product {
  template <typename T>
  static T of(T a, T b) {
    return a * b;
  }
#if defined(__x86_64__)
  INLINED_FOR_AVX2 static __m256 of_8(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
#endif
};

struct Minimum {
  template <typename T>
  static T of(T a, T b) {
    return a < b || a != a ? a : b;
  }
#if defined(__x86_64__)
  INLINED_FOR_AVX2 static __m256 of_8(__m256 a, __m256 b) {
    return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));  // min_ps(NaN, b) is b
  }
#endif
};

struct Maximum {
  template <typename T>
  static T of(T a, T b) {
    return a > b || a != a ? a : b;
  }
#if defined(__x86_64__)
  INLINED_FOR_AVX2 static __m256 of_8(__m256 a, __m256 b) {
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
#endif
};

// A format in which torch adds.
template <typename T>
struct Plain {
  using Stored = T;
  using Wide = T;

  static T widen(T value) { return value; }
  static T narrow(T value) { return value; }
};

// How a sum becomes a mean: as in divide().
struct Division {
  Division(bool is_mean, size_t ranks)
      : is_mean(is_mean), multiplies(is_mean && (ranks & (ranks - 1)) == 0), divides(is_mean && !multiplies),
        number(multiplies ? 1 / static_cast<double>(ranks) : static_cast<double>(ranks)) {}

  template <typename T>
  T of(T total) const {
    return multiplies ? total * static_cast<T>(number) : total / static_cast<T>(number);
  }

  const bool is_mean, multiplies, divides;
  const double number;
};

// Reduces numbers [start, end) of all ranks, in rank order. `out` may be one of the parts.
template <typename Format, typename Combine, typename Stored = typename Format::Stored>
void reduce_numbers(Stored* out, const std::vector<const Stored*>& parts, int64_t start, int64_t end,
                    const Division& division) {
  for (int64_t i = start; i < end; ++i) {
    typename Format::Wide total = Format::widen(parts[0][i]);
    for (size_t rank = 1; rank < parts.size(); ++rank) total = Combine::of(total, Format::widen(parts[rank][i]));
    out[i] = Format::narrow(division.is_mean ? division.of(Format::widen(Format::narrow(total))) : total);
  }
}

#if defined(__x86_64__)
template <typename Format>
INLINED_FOR_AVX2 __m256 widened(const uint16_t* numbers) {
  return Format::widen_8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
}

template <typename Format, typename Combine>
FOR_AVX2 void reduce_numbers_by_16(uint16_t* out, const std::vector<const uint16_t*>& parts, int64_t count,
                                   const Division& division) {
  const uint16_t *const first = parts[0], *const second = parts[1];
  const size_t ranks = parts.size();
  const bool multiplies = division.multiplies, divides = division.divides;
  const __m256 number = _mm256_set1_ps(static_cast<float>(division.number));
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    __m256 low = Combine::of_8(widened<Format>(first + i), widened<Format>(second + i));
    __m256 high = Combine::of_8(widened<Format>(first + i + 8), widened<Format>(second + i + 8));
    for (size_t rank = 2; rank < ranks; ++rank) {
      low = Combine::of_8(low, widened<Format>(parts[rank] + i));
      high = Combine::of_8(high, widened<Format>(parts[rank] + i + 8));
    }
    if (multiplies) {
      low = _mm256_mul_ps(Format::round_8(low), number);
      high = _mm256_mul_ps(Format::round_8(high), number);
    } else if (divides) {
      low = _mm256_div_ps(Format::round_8(low), number);
      high = _mm256_div_ps(Format::round_8(high), number);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), Format::narrow_16(low, high));
  }
  reduce_numbers<Format, Combine>(out, parts, i, count, division);
}
#endif

template <typename Format, typename Combine, typename Stored = typename Format::Stored>
void reduce_all(char* out, const Parts& parts, int64_t nbytes, const Division& division) {
  std::vector<const Stored*> numbers;
  for (const char* part : parts) numbers.push_back(reinterpret_cast<const Stored*>(part));
  const auto result = reinterpret_cast<Stored*>(out);
  const int64_t count = nbytes / static_cast<int64_t>(sizeof(Stored));
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if constexpr (sizeof(Stored) == 2) {
    if (has_avx2) return reduce_numbers_by_16<Format, Combine>(result, numbers, count, division);
  }
#endif
  reduce_numbers<Format, Combine>(result, numbers, 0, count, division);
}

template <typename Format>
void reduce_floats(Op op, char* out, const Parts& parts, int64_t nbytes) {
  const Division division(op == Op::mean, parts.size());
  switch (op) {
    case Op::sum:
    case Op::mean: return reduce_all<Format, Sum>(out, parts, nbytes, division);
    case Op::product: return reduce_all<Format, Product>(out, parts, nbytes, division);
    case Op::min: return reduce_all<Format, Minimum>(out, parts, nbytes, division);
    case Op::max: return reduce_all<Format, Maximum>(out, parts, nbytes, division);
  }
}

}  // namespace

void reduce(Op op, char* out, const Parts& parts, int64_t nbytes, at::ScalarType dtype) {
  if (nbytes == 0) return;
  if (parts.size() == 1) {
    std::memmove(out, parts[0], nbytes);
  } else if (dtype == at::kBFloat16) {
    reduce_floats<BFloat16>(op, out, parts, nbytes);
  } else if (dtype == at::kHalf) {
    reduce_floats<Float16>(op, out, parts, nbytes);
  } else if (dtype == at::kFloat && nbytes <= kSmallBytes) {
    reduce_floats<Plain<float>>(op, out, parts, nbytes);
  } else if (dtype == at::kDouble && nbytes <= kSmallBytes) {
    reduce_floats<Plain<double>>(op, out, parts, nbytes);
  } else {
    reduce_two(op, out, parts[0], parts[1], nbytes, dtype);
    for (size_t rank = 2; rank < parts.size(); ++rank) reduce_two(op, out, out, parts[rank], nbytes, dtype);
    if (op == Op::mean) divide(out, nbytes, dtype, static_cast<int64_t>(parts.size()));
  }
}
