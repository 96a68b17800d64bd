// Vectors of float32, and weights of three kinds widened into them. Nothing is fused but by name (`fused`).
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

#ifdef __AVX512F__
constexpr int L = 16;  // lanes
#else
constexpr int L = 8;
#endif
typedef float Vec __attribute__((vector_size(4 * L)));
typedef int32_t Ints __attribute__((vector_size(4 * L)));
typedef uint32_t Words __attribute__((vector_size(4 * L)));
typedef uint16_t Halves __attribute__((vector_size(2 * L)));
typedef int8_t Bytes __attribute__((vector_size(L)));

struct BFloat {
    uint16_t bits;
};

template <class V>
inline V read(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
// Widening by name where the compiler's own choice was seen to be slow (GCC 12 takes int8 apart byte by byte).
#if defined(__AVX512F__)
inline Words widen(const BFloat* from) { return (Words)_mm512_cvtepu16_epi32(read<__m256i>(from)); }
inline Ints widen(const int8_t* from) { return (Ints)_mm512_cvtepi8_epi32(read<__m128i>(from)); }
#elif defined(__AVX2__)
inline Words widen(const BFloat* from) { return (Words)_mm256_cvtepu16_epi32(read<__m128i>(from)); }
inline Ints widen(const int8_t* from) { return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
#else
inline Words widen(const BFloat* from) { return __builtin_convertvector(read<Halves>(from), Words); }
inline Ints widen(const int8_t* from) { return __builtin_convertvector(read<Bytes>(from), Ints); }
#endif
// a * b + c, rounded once, by name: the compiler is told to fuse nothing itself (-ffp-contract=off), for it may choose
// otherwise for one number of rows than for another.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    for (int i = 0; i < L; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}
// All lanes the same.
inline Vec spread(float value) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(value);
#elif defined(__AVX2__)
    return _mm256_set1_ps(value);
#else
    Vec all;
    for (int i = 0; i < L; i++) all[i] = value;
    return all;
#endif
}
inline Vec load(const float* from) { return read<Vec>(from); }
inline Vec load(const BFloat* from) { return (Vec)(widen(from) << 16); }
inline Vec load(const int8_t* from) { return __builtin_convertvector(widen(from), Vec); }
inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof value); }
inline float one(float value) { return value; }
inline float one(BFloat value) { return read<float>(&(const uint32_t&)(uint32_t(value.bits) << 16)); }
inline float one(int8_t value) { return value; }
inline void put(float& to, float value) { to = value; }
inline void put(BFloat& to, float value) {  // to nearest, ties to even
    uint32_t bits = read<uint32_t>(&value);
    to.bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float sum(Vec value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(value);
#else
    float lanes[L];
    std::memcpy(lanes, &value, sizeof value);
    for (int half = L / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

// The lanes of a and b by turns: of their first halves, and of their second.
inline void interleave(Vec a, Vec b, Vec& low, Vec& high) {
#if defined(__AVX512F__)
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    low = _mm512_permutex2var_ps(a, first, b);
    high = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(8)), b);
#elif defined(__AVX2__)
    __m256 lows = _mm256_unpacklo_ps(a, b), highs = _mm256_unpackhi_ps(a, b);
    low = _mm256_permute2f128_ps(lows, highs, 0x20);
    high = _mm256_permute2f128_ps(lows, highs, 0x31);
#else
    for (int i = 0; i < L; i++) {
        low[i] = i % 2 ? b[i / 2] : a[i / 2];
        high[i] = i % 2 ? b[L / 2 + i / 2] : a[L / 2 + i / 2];
    }
#endif
}

// L rows of L lanes to their columns: as many interleavings as L has halves.
inline void transpose(Vec (&rows)[L]) {
    for (int stage = L; stage > 1; stage /= 2) {
        Vec turned[L];
#pragma GCC unroll 8
        for (int i = 0; i < L / 2; i++) interleave(rows[i], rows[i + L / 2], turned[2 * i], turned[2 * i + 1]);
        std::memcpy(rows, turned, sizeof turned);
    }
}

// e^x to about 1e-7, by range reduction and a polynomial (Cephes' expf).
inline Vec exponential(Vec x) {
    x = x < -87.f ? Vec{} - 87.f : x > 88.f ? Vec{} + 88.f : x;
    Vec n = (x * 1.44269504f + 12582912.f) - 12582912.f;
    Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    return p * (Vec)((__builtin_convertvector(n, Ints) + 127) << 23);
}

}  // namespace
