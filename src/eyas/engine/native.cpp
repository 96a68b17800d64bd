// One forward of a Llama-type decoder over a few rows, in float32 arithmetic over weights kept in float32, bfloat16 or
// int8 (a scale per output). Compiled at first use (native_build.py), called through ctypes (native.py).
//
// Every sum of a row is taken in an order that depends on the row's own position and shapes alone: not on how many rows
// are computed beside it, where it lies among them, how many threads share the work, or which slots a tree's rows took.
// So a row has the same bits in plain decoding, in a chain and in a tree, by construction.
//
// Letters: R rows, H hidden, N query heads, K key/value heads, E head width, F inner width of the MLP, S cache slots.

#include <omp.h>

#include "products.hpp"

namespace {

struct Layer {
    Matrix q, k, v, o, gate, up, down;
    const float *input_norm, *hidden_norm, *post_norm, *q_norm, *k_norm;  // null where there is none
    int64_t window;                                                      // 0: none
};

struct Model {
    const Layer* layers;
    int64_t count, hidden, heads, kv_heads, width, inner;
    Matrix embedding;
    const float *final_norm, *cos, *sin;  // rope tables [positions, E]
    int64_t cache_kind, norm_before_residual;
    float eps, scale;
};

// One text's rows in a forward, which begin at `row`, and its cache.
struct Text {
    void *const *keys, *const *values;  // [K, S, E] a layer
    const int64_t* followed;  // [rows, depths]: a row's token at position base + d lies in slot base + followed[., d]; null: d
    int64_t slots, base, first, depths, row;  // its i-th row lies in slot base + first + i
};

struct Step {
    const int64_t *ids, *positions, *owner;  // owner: which of `texts` a row belongs to
    const Text* texts;
    int64_t rows, slots;                // slots: the most of any text
    const float* state;                 // [R, H]: a draft's fed states; null for a target
    float *last, *normed;               // [R, H] each: the last layer's output, and its final norm (may be null)
    const int64_t* boundaries;          // `taps` of them, ascending
    float* taps;                        // [R, taps, H]
    int64_t tapped, threads, last_only, prompt;     // prompt: rows that need no fixed order of sums
    float* scratch;
};

struct Range {
    int64_t from, to;
};

struct Worker {
    int64_t index, count;

    Range share(int64_t total, int64_t unit = 1) const {
        int64_t units = (total + unit - 1) / unit;
        return {std::min(total, units * index / count * unit), std::min(total, units * (index + 1) / count * unit)};
    }
    // `widened`: room for WIDE weight rows, for a prompt's product; null for a few rows.
    void multiply(const Matrix& m, const float* x, int64_t stride, int64_t rows, const Sink& sink,
                  float* widened = nullptr) const {
        auto [from, end] = share(m.out, 8);
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

void rms_norm(const float* x, const float* weight, int64_t width, float eps, float* to) {
    Vec squares = {};
    int64_t i = 0;
    for (; i + L <= width; i += L) squares = fused(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (int64_t k = i; k < width; k++) total += x[k] * x[k];
    float scale = 1.f / std::sqrt(total / width + eps);
    for (i = 0; i + L <= width; i += L) store(to + i, load(x + i) * scale * load(weight + i));
    for (; i < width; i++) to[i] = x[i] * scale * weight[i];
}

// In place, or rounded into the cache.
template <class C>
void rope(const float* x, const float* cos, const float* sin, int64_t width, C* to) {
    int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        put(to[i], a * cos[i] - b * sin[i]);
        put(to[i + half], b * cos[i + half] + a * sin[i + half]);
    }
}

template <class C>
struct Attention {
    const Model& m;
    const Step& step;
    const Text& text;
    const Layer& layer;
    C *keys, *values;

    Attention(const Model& m, const Step& s, int64_t index, int64_t row)
        : m(m), step(s), text(s.texts[s.owner[row]]), layer(m.layers[index]), keys((C*)text.keys[index]),
          values((C*)text.values[index]) {}

    int64_t slot(int64_t row, int64_t position) const {
        int64_t depth = position - text.base;
        if (depth < 0 || !text.followed) return position;
        return text.base + text.followed[(row - text.row) * text.depths + depth];
    }

    void remember(int64_t row, int64_t head, float* key, const float* value) const {
        int64_t slot = head * text.slots + text.base + text.first + row - text.row;
        int64_t place = slot * m.width, at = step.positions[row] * m.width;
        if (layer.k_norm) rms_norm(key, layer.k_norm, m.width, m.eps, key);
        rope(key, m.cos + at, m.sin + at, m.width, keys + place);
        for (int64_t e = 0; e < m.width; e++) put(values[place + e], value[e]);
    }

    // The context of one head of one row; `scores` has room for its positions and a vector more.
    void attend(int64_t row, int64_t head, float* query, float* scores, float* context) const {
        int64_t position = step.positions[row], width = m.width;
        if (layer.q_norm) rms_norm(query, layer.q_norm, width, m.eps, query);
        rope(query, m.cos + position * width, m.sin + position * width, width, query);
        int64_t group = head / (m.heads / m.kv_heads) * text.slots * width;
        const C *keys = this->keys + group, *values = this->values + group;
        int64_t from = layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0;
        int64_t count = position + 1 - from;
        for (int64_t j = from; j <= position; j++) {
            float score[1];
            dots<C, 1>(keys + slot(row, j) * width, width, query, width, score);
            scores[j - from] = score[0] * m.scale;
        }
        float total = softmax(scores, count);
        int64_t e = 0;
        for (; e + 4 * L <= width; e += 4 * L) blend<4>(row, from, count, scores, values + e, total, context + e);
        for (; e + L <= width; e += L) blend<1>(row, from, count, scores, values + e, total, context + e);
        for (; e < width; e++) {
            float mixed = 0;
            for (int64_t k = 0; k < count; k++) mixed += scores[k] * one(values[slot(row, from + k) * width + e]);
            context[e] = mixed / total;
        }
    }

    // Scores to their exponentials; returns the sum.
    static float softmax(float* scores, int64_t count) {
        float highest = *std::max_element(scores, scores + count);
        Vec sums = {};
        std::fill(scores + count, scores + (count + L - 1) / L * L, -INFINITY);
        for (int64_t k = 0; k < count; k += L) store(scores + k, exponential(load(scores + k) - highest));
        std::fill(scores + count, scores + (count + L - 1) / L * L, 0.f);
        for (int64_t k = 0; k < count; k += L) sums += load(scores + k);
        return sum(sums);
    }

    template <int B>
    void blend(int64_t row, int64_t from, int64_t count, const float* weights, const C* values, float total,
               float* context) const {
        Vec even[B] = {}, odd[B] = {};  // two chains of sums, by the parity of a position's place
        int64_t k = 0;
        for (; k + 2 <= count; k += 2) {
            const C *a = values + slot(row, from + k) * m.width, *b = values + slot(row, from + k + 1) * m.width;
            for (int i = 0; i < B; i++) even[i] = fused(Vec{} + weights[k], load(a + i * L), even[i]);
            for (int i = 0; i < B; i++) odd[i] = fused(Vec{} + weights[k + 1], load(b + i * L), odd[i]);
        }
        if (k < count)
            for (int i = 0; i < B; i++)
                even[i] = fused(Vec{} + weights[k], load(values + slot(row, from + k) * m.width + i * L), even[i]);
        for (int i = 0; i < B; i++) store(context + i * L, (even[i] + odd[i]) / total);
    }
};

// silu(gate) * up of columns [from, to), into gate.
void gated(float* gate, const float* up, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i += L) {
        float g[L] = {}, u[L] = {};
        size_t bytes = sizeof(float) * std::min<int64_t>(L, to - i);
        std::memcpy(g, gate + i, bytes);
        std::memcpy(u, up + i, bytes);
        Vec x = load(g);
        store(g, x / (1.f + exponential(-x)) * load(u));
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
        int64_t own = rows * 2 * m.hidden + 16, scored = slots + 2 * L;
        int64_t weights = WIDE * std::max({2 * m.hidden, m.inner, m.heads * m.width});
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
    auto [q0, q1] = w.share(m.heads * kept);
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
    auto [from, to] = w.share(F, 8);
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
