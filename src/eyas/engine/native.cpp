// One forward of a Llama-type decoder over a few rows, in float32 arithmetic over weights kept in float32, bfloat16 or
// int8 (a scale per output). Compiled at first use (native_build.py), called through ctypes (native.py).
//
// Every sum of a row is taken in an order that depends on the row's own position and shapes alone: not on how many rows
// are computed beside it, where it lies among them, how many threads share the work, or which slots a tree's rows took.
// So a row has the same bits in plain decoding, in a chain and in a tree, by construction.
//
// Letters: R rows, H hidden, N query heads, K key/value heads, E head width, F inner width of the MLP, S cache slots.

#include <omp.h>

#include "attention.hpp"

namespace {

struct Range {
    int64_t from, to;
};

struct Worker {
    int64_t index, count;

    Range share(int64_t total, int64_t unit = 1) const {
        int64_t units = (total + unit - 1) / unit;
        return {std::min(total, units * index / count * unit), std::min(total, units * (index + 1) / count * unit)};
    }
    // Outputs of a product, of which a worker has the same in every matrix of that many.
    Range outputs(int64_t total, bool prompt) const { return share(total, prompt ? WIDE : 8); }
    // `widened`: room for WIDE weight rows, for a prompt's product; null for a few rows.
    void multiply(const Matrix& m, const float* x, int64_t stride, int64_t rows, const Sink& sink,
                  float* widened = nullptr) const {
        auto [from, end] = outputs(m.out, widened);
        if (widened) {
            auto run = m.kind == FLOAT32    ? prompt_product<float>
                       : m.kind == BFLOAT16 ? prompt_product<BFloat>
                                            : prompt_product<int8_t>;
            run(m, from, end, x, stride, rows, sink, widened);
        } else {
            auto run = m.kind == FLOAT32 ? product<float> : m.kind == BFLOAT16 ? product<BFloat> : product<int8_t>;
            run(m, from, end, x, stride, rows, sink);
        }
    }
};

// silu(gate) * up of columns [from, to), into gate.
void gated(float* gate, const float* up, int64_t from, int64_t to) {
    auto silu = [](Vec x, Vec up) { return x / (1.f + exponential(-x)) * up; };
    int64_t i = from;
    for (; i + L <= to; i += L) store(gate + i, silu(load(gate + i), load(up + i)));
    if (i < to) {
        float g[L] = {}, u[L] = {};
        size_t bytes = sizeof(float) * std::min<int64_t>(L, to - i);
        std::memcpy(g, gate + i, bytes);
        std::memcpy(u, up + i, bytes);
        store(g, silu(load(g), load(u)));
        std::memcpy(gate + i, g, bytes);
    }
}

// Shared by all threads: residual, query, key, value, context, gate, up. A thread's own: normed rows, scores, weights.
struct Buffers {
    float *x, *query, *key, *value, *context, *gate, *up, *normed, *scores, *widened;
    int64_t size;

    Buffers(const Model& m, int64_t rows, int64_t slots, int64_t threads, int64_t thread, float* scratch) {
        float* next = scratch;
        auto take = [&](int64_t floats) {
            float* taken = next;
            next += (floats + 15) / 16 * 16;
            return taken;
        };
        x = take(rows * m.hidden);
        query = take(rows * m.heads * m.width);
        key = take(rows * m.kv_heads * m.width);
        value = take(rows * m.kv_heads * m.width);
        context = take(rows * m.heads * m.width);
        gate = take(rows * m.inner);
        up = take(rows * m.inner);
        int64_t own = (rows * 2 * m.hidden + 15) / 16 * 16, scored = m.heads / m.kv_heads * TALL * (slots + 2 * WIDE);
        int64_t weights = WIDE * std::max({2 * m.hidden, m.inner, m.heads * m.width, BLOCK});
        int64_t all = (own + scored + weights + 15) / 16 * 16;
        normed = take(threads * all) + thread * all;
        scores = normed + own;
        widened = scores + scored;
        size = next - scratch;
    }
};

void embed(const Matrix& table, int64_t id, float* to) {
    for (int64_t i = 0; i < table.in; i++)
        to[i] = table.kind == FLOAT32 ? ((const float*)table.data)[id * table.in + i]
                                      : one(((const BFloat*)table.data)[id * table.in + i]);
}

// A draft's first layer: its attention reads cat(norm(embedding), norm(state)).
void draft_input(const Model& m, const Layer& layer, const Step& s, const Buffers& b, int64_t row) {
    float* joined = b.normed + row * 2 * m.hidden;
    embed(m.embedding, s.ids[row], joined + m.hidden);
    rms_norm(joined + m.hidden, layer.input_norm, m.hidden, m.eps, joined);
    rms_norm(s.state + row * m.hidden, layer.hidden_norm, m.hidden, m.eps, joined + m.hidden);
}

// Keys and values of all rows, contexts of those from `gone` on.
template <class C>
void attention(const Model& m, int64_t index, const Step& s, int64_t gone, const Buffers& b, const Worker& w) {
    int64_t q = m.heads * m.width, kv = m.kv_heads * m.width, kept = s.rows - gone;
    auto [k0, k1] = w.share(m.kv_heads * s.rows);
    for (int64_t job = k0; job < k1; job++) {
        int64_t head = job / s.rows, row = job % s.rows, place = row * kv + head * m.width;
        Attention<C>(m, s, index, row).remember(row, head, b.key + place, b.value + place);
    }
#pragma omp barrier
    if (s.prompt) {
        int64_t tiles = (kept + TALL - 1) / TALL;
        auto [t0, t1] = w.share(m.kv_heads * tiles);
        for (int64_t job = t0; job < t1; job++) {
            int64_t head = job / tiles, tile = job % tiles, row = kept * tile / tiles;
            PromptAttention<C>(m, s, index, gone, head, row, kept * (tile + 1) / tiles - row, b.query, b.context,
                               b.scores, b.widened)
                .run();
        }
    }
    auto [q0, q1] = w.share(s.prompt ? 0 : m.heads * kept);
    for (int64_t job = q0; job < q1; job++) {
        int64_t head = job / kept, row = job % kept, place = row * q + head * m.width;
        Attention<C>(m, s, index, gone + row).attend(gone + row, head, b.query + place, b.scores, b.context + place);
    }
#pragma omp barrier
}

// `last_only`: of the last layer only the last row's output is wanted; the others leave their keys and values.
void run_layer(const Model& m, int64_t index, const Step& s, const Buffers& b, const Worker& w) {
    const Layer& layer = m.layers[index];
    int64_t H = m.hidden, q = m.heads * m.width, kv = m.kv_heads * m.width, F = m.inner;
    bool first = layer.hidden_norm != nullptr;
    int64_t in = first ? 2 * H : H, gone = s.last_only && index + 1 == m.count ? s.rows - 1 : 0, kept = s.rows - gone;
    float *widened = s.prompt ? b.widened : nullptr, *x = b.x + gone * H, *normed = b.normed + gone * in;
    for (int64_t row = 0; row < s.rows; row++) {
        if (first)
            draft_input(m, layer, s, b, row);
        else
            rms_norm(b.x + row * H, layer.input_norm, H, m.eps, b.normed + row * H);
    }
    w.multiply(layer.k, b.normed, in, s.rows, {b.key, kv, false}, widened);
    w.multiply(layer.v, b.normed, in, s.rows, {b.value, kv, false}, widened);
    if (gone) widened = nullptr;
    w.multiply(layer.q, normed, in, kept, {b.query, q, false}, widened);
    if (first && w.index == 0)
        for (int64_t row = 0; row < s.rows; row++)
            std::memcpy(b.x + row * H, m.norm_before_residual ? b.normed + row * in + H : s.state + row * H, H * 4);
#pragma omp barrier
    m.cache_kind == FLOAT32 ? attention<float>(m, index, s, gone, b, w) : attention<BFloat>(m, index, s, gone, b, w);
    w.multiply(layer.o, b.context, q, kept, {x, H, true}, widened);
#pragma omp barrier
    for (int64_t row = 0; row < kept; row++) rms_norm(x + row * H, layer.post_norm, H, m.eps, normed + row * H);
    w.multiply(layer.gate, normed, H, kept, {b.gate, F, false}, widened);
    w.multiply(layer.up, normed, H, kept, {b.up, F, false}, widened);
    auto [from, to] = w.outputs(F, widened);  // a worker's own: no barrier between
    for (int64_t row = 0; row < kept; row++) gated(b.gate + row * F, b.up + row * F, from, to);
#pragma omp barrier
    w.multiply(layer.down, b.gate, F, kept, {x, H, true}, widened);
#pragma omp barrier
}

void run(const Model& m, const Step& s, const Worker& w) {
    Buffers b(m, s.rows, s.slots, w.count, w.index, s.scratch);
    int64_t H = m.hidden, tap = 0;
    auto [r0, r1] = w.share(s.rows);
    if (!s.state)
        for (int64_t row = r0; row < r1; row++) embed(m.embedding, s.ids[row], b.x + row * H);
#pragma omp barrier
    for (int64_t index = 0; index <= m.count; index++) {
        if (tap < s.tapped && s.boundaries[tap] == index) {
            for (int64_t row = r0; row < r1; row++)
                std::memcpy(s.taps + (row * s.tapped + tap) * H, b.x + row * H, H * 4);
            tap++;
        }
        if (index < m.count) run_layer(m, index, s, b, w);
    }
    for (int64_t row = r0; row < r1; row++) {
        std::memcpy(s.last + row * H, b.x + row * H, H * 4);
        if (s.normed) rms_norm(b.x + row * H, m.final_norm, H, m.eps, s.normed + row * H);
    }
}

}  // namespace

extern "C" {

int64_t eyas_scratch(const Model* m, int64_t rows, int64_t slots, int64_t threads) {
    return Buffers(*m, rows, slots, threads, 0, nullptr).size;
}

void eyas_forward(const Model* m, const Step* s) {
#pragma omp parallel num_threads(s->threads)
    run(*m, *s, Worker{omp_get_thread_num(), omp_get_num_threads()});
}

// y [rows, out] = x [rows, in] times the matrix.
void eyas_multiply(const Matrix* m, const float* x, int64_t rows, float* y, int64_t threads) {
#pragma omp parallel num_threads(threads)
    Worker{omp_get_thread_num(), omp_get_num_threads()}.multiply(*m, x, m->in, rows, {y, m->out, false});
}

// Reads `bytes` of memory as fast as the threads can: what bandwidth is measured with. Returns a sum, so that it is done.
int64_t eyas_read(const void* from, int64_t bytes, int64_t threads) {
    int64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        auto [first, end] = Worker{omp_get_thread_num(), omp_get_num_threads()}.share(bytes / 512);
        Ints sums = {};
        for (const char* at = (const char*)from + first * 512; at < (const char*)from + end * 512; at += sizeof sums) {
            if ((int64_t)at % 64 == 0) __builtin_prefetch(at + AHEAD);
            sums += read<Ints>(at);
        }
        for (int i = 0; i < L; i++) total += sums[i];
    }
    return total;
}

// Each row of x [rows, width] to its RMS norm.
void eyas_norm(const float* x, const float* weight, int64_t rows, int64_t width, float eps, float* y) {
    for (int64_t row = 0; row < rows; row++) rms_norm(x + row * width, weight, width, eps, y + row * width);
}
}
