// Products of a matrix with a few rows, each summed in an order of its own, and with a prompt's many.
#pragma once

#include "lanes.hpp"

namespace {

enum Kind { FLOAT32, BFLOAT16, INT8 };

struct Matrix {
    const void* data;    // [out, in], rows contiguous
    const float* scale;  // [out] or null
    const float* bias;   // [out] or null
    int64_t out, in, kind;
};

// One weight row times `R` rows of x. The weights are one sequential stream, prefetched by hand: on the machines tried that
// read them faster than several streams side by side. A row's sum is always taken in the same CHAINS parts.
constexpr int CHAINS = 4, MOST = 6, AHEAD = 4096;

template <class W, int R>
inline void dots(const W* w, int64_t in, const float* x, int64_t stride, float (&out)[R]) {
    Vec acc[CHAINS][R] = {};
    int64_t i = 0;
    for (; i + CHAINS * L <= in; i += CHAINS * L) {
#pragma GCC unroll 8
        for (unsigned byte = 0; byte < CHAINS * L * sizeof(W); byte += 64)
            __builtin_prefetch((const char*)(w + i) + byte + AHEAD);
#pragma GCC unroll 8
        for (int c = 0; c < CHAINS; c++) {
            Vec weight = load(w + i + c * L);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) acc[c][r] = fused(weight, load(x + r * stride + i + c * L), acc[c][r]);
        }
    }
    for (; i + L <= in; i += L) {
        Vec weight = load(w + i);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[0][r] = fused(weight, load(x + r * stride + i), acc[0][r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) out[r] = sum((acc[0][r] + acc[1][r]) + (acc[2][r] + acc[3][r]));
    for (; i < in; i++)
        for (int r = 0; r < R; r++) out[r] += one(w[i]) * x[r * stride + i];
}

// Where products go: y[row, output] = or += the sum, scaled and biased.
struct Sink {
    float* y;
    int64_t pitch;
    bool add;

    void put(const Matrix& m, int64_t row, int64_t o, float value) const {
        if (m.scale) value *= m.scale[o];
        if (m.bias) value += m.bias[o];
        float& place = y[row * pitch + o];
        place = add ? place + value : value;
    }
    // Outputs o to o + L - 1 of a row.
    void put_lanes(const Matrix& m, int64_t row, int64_t o, Vec value) const {
        if (m.scale) value *= load(m.scale + o);
        if (m.bias) value += load(m.bias + o);
        float* place = y + row * pitch + o;
        store(place, add ? load(place) + value : value);
    }
};

template <class W, int R>
inline void outputs(const Matrix& m, int64_t o, const float* x, int64_t stride, int64_t row, const Sink& sink) {
    float out[R];
    dots<W, R>((const W*)m.data + o * m.in, m.in, x + row * stride, stride, out);
    for (int r = 0; r < R; r++) sink.put(m, row + r, o, out[r]);
}

// Outputs [o, end) of a few rows.
template <class W>
void product(const Matrix& m, int64_t o, int64_t end, const float* x, int64_t stride, int64_t rows, const Sink& sink) {
    static constexpr decltype(&outputs<W, 1>) table[MOST] = {outputs<W, 1>, outputs<W, 2>, outputs<W, 3>,
                                                             outputs<W, 4>, outputs<W, 5>, outputs<W, 6>};
    int64_t parts = (rows + MOST - 1) / MOST;
    for (; o < end; o++)
        for (int64_t part = 0; part < parts; part++) {
            int64_t row = rows * part / parts;
            table[rows * (part + 1) / parts - row - 1](m, o, x, stride, row, sink);
        }
}

// The same for a prompt, whose rows need no order of sums that single rows share: WIDE outputs at a time are widened and
// turned, so that a lane is an output, and kept in the second cache while tiles of TALL rows pass over them. A row's sum
// runs along its inputs in one lane, whatever tile it is in.
constexpr int TALL = L == 16 ? 14 : 6, WIDE = 2 * L;  // 2 * TALL sums and a few operands fill the registers

// [WIDE, in] of the matrix to [in, WIDE], rows beyond `wide` repeating the last.
template <class W>
void turn(const W* w, int64_t in, int64_t wide, float* to) {
    int64_t i = 0;
    for (; i + L <= in; i += L)
        for (int half = 0; half < 2; half++) {
            Vec block[L];
            for (int o = 0; o < L; o++) block[o] = load(w + std::min<int64_t>(half * L + o, wide - 1) * in + i);
            transpose(block);
            for (int k = 0; k < L; k++) store(to + (i + k) * WIDE + half * L, block[k]);
        }
    for (; i < in; i++)
        for (int o = 0; o < WIDE; o++) to[i * WIDE + o] = one(w[std::min<int64_t>(o, wide - 1) * in + i]);
}

template <int R>
void tile(const Matrix& m, int64_t o, int64_t wide, const float* turned, const float* x, int64_t stride, int64_t row,
          const Sink& sink) {
    Vec left[R] = {}, right[R] = {};
    x += row * stride;
    for (int64_t i = 0; i < m.in; i++) {
        Vec a = load(turned + i * WIDE), b = load(turned + i * WIDE + L);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            Vec value = spread(x[r * stride + i]);
            left[r] = fused(a, value, left[r]);
            right[r] = fused(b, value, right[r]);
        }
    }
    if (wide == WIDE)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            sink.put_lanes(m, row + r, o, left[r]);
            sink.put_lanes(m, row + r, o + L, right[r]);
        }
    else
        for (int r = 0; r < R; r++) {
            float out[WIDE];
            store(out, left[r]);
            store(out + L, right[r]);
            for (int64_t k = 0; k < wide; k++) sink.put(m, row + r, o + k, out[k]);
        }
}

template <int... R>
void tile_of(int64_t rows, const Matrix& m, int64_t o, int64_t wide, const float* turned, const float* x,
             int64_t stride, int64_t row, const Sink& sink, std::integer_sequence<int, R...>) {
    static constexpr decltype(&tile<1>) table[] = {tile<R + 1>...};
    table[rows - 1](m, o, wide, turned, x, stride, row, sink);
}

// Rows [row, row + rows) of at most TALL.
inline void tile_of(int64_t rows, const Matrix& m, int64_t o, int64_t wide, const float* turned, const float* x,
                    int64_t stride, int64_t row, const Sink& sink) {
    tile_of(rows, m, o, wide, turned, x, stride, row, sink, std::make_integer_sequence<int, TALL>());
}

template <class W>
void prompt_product(const Matrix& m, int64_t o, int64_t end, const float* x, int64_t stride, int64_t rows,
                    const Sink& sink, float* turned) {
    int64_t parts = (rows + TALL - 1) / TALL;
    for (; o < end; o += WIDE) {
        int64_t wide = std::min<int64_t>(WIDE, end - o), next = wide * m.in * sizeof(W);
        const W* w = (const W*)m.data + o * m.in;
        turn(w, m.in, wide, turned);
        for (int64_t part = 0; part < parts; part++) {
            int64_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
            for (int64_t at = next * part / parts / 64 * 64; at < next * (part + 1) / parts; at += 64)
                __builtin_prefetch((const char*)(w + wide * m.in) + at, 0, 2);  // the next outputs' weights
            tile_of(count, m, o, wide, turned, x, stride, row, sink);
        }
    }
}

}  // namespace
