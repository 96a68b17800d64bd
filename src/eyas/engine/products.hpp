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

// The same for a prompt, whose rows need no fixed order of sums: tiles of TALL rows by WIDE outputs, widened once.
constexpr int TALL = 6, WIDE = 4;

template <int R>
inline void tile(const Matrix& m, int64_t o, int64_t wide, const float* w, const float* x, int64_t stride, int64_t row,
                 const Sink& sink) {
    Vec acc[WIDE][R] = {};
    int64_t i = 0;
    x += row * stride;
    for (; i + L <= m.in; i += L) {
        Vec xs[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) xs[r] = load(x + r * stride + i);
#pragma GCC unroll 8
        for (int b = 0; b < WIDE; b++) {
            Vec weight = load(w + b * m.in + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) acc[b][r] = fused(weight, xs[r], acc[b][r]);
        }
    }
    float out[WIDE][R];
#pragma GCC unroll 8
    for (int b = 0; b < WIDE; b++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) out[b][r] = sum(acc[b][r]);
    for (int b = 0; b < wide; b++)
        for (int r = 0; r < R; r++) {
            for (int64_t k = i; k < m.in; k++) out[b][r] += w[b * m.in + k] * x[r * stride + k];
            sink.put(m, row + r, o + b, out[b][r]);
        }
}

template <class W>
void prompt_product(const Matrix& m, int64_t o, int64_t end, const float* x, int64_t stride, int64_t rows,
                    const Sink& sink, float* widened) {
    for (; o < end; o += WIDE) {
        int64_t wide = std::min<int64_t>(WIDE, end - o), count = wide * m.in, i = 0;
        const W* w = (const W*)m.data + o * m.in;
        for (; i + L <= count; i += L) store(widened + i, load(w + i));
        for (; i < count; i++) widened[i] = one(w[i]);
        int64_t row = 0;
        for (; row + TALL <= rows; row += TALL) tile<TALL>(m, o, wide, widened, x, stride, row, sink);
        for (; row < rows; row++) tile<1>(m, o, wide, widened, x, stride, row, sink);
    }
}

}  // namespace
