// What a forward is given, and its attention: of single rows, whose bits no other row touches, and of a prompt's many.
// Letters as in native.cpp.
#pragma once

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

// Attention of a tile of a prompt's rows over one key/value head, as products: scores of WIDE keys at a time, then BLOCK
// values at a time, both cut at multiples of these whatever the tile. Keys that a row does not see weigh exactly nothing.
constexpr int64_t BLOCK = 512;

template <class C>
struct PromptAttention {
    const Model& m;
    const Step& step;
    const Layer& layer;
    int64_t head, group, first, count;  // its rows, among those whose output is wanted
    const int64_t* positions;           // of its rows
    float *query, *context, *scores, *turned;
    int64_t from, end, pitch;  // keys that any of them sees, and the room of a row of scores
    const C *keys, *values;

    PromptAttention(const Model& m, const Step& s, int64_t index, int64_t gone, int64_t head, int64_t first,
                    int64_t count, float* query, float* context, float* scores, float* turned)
        : m(m), step(s), layer(m.layers[index]), head(head), group(m.heads / m.kv_heads), first(first), count(count),
          positions(s.positions + gone + first), query(query), context(context), scores(scores), turned(turned),
          from(lowest(positions[0]) / WIDE * WIDE), end(positions[count - 1] + 1),
          pitch((end - from + WIDE - 1) / WIDE * WIDE + L) {
        keys = (const C*)s.texts[0].keys[index] + head * s.texts[0].slots * m.width;
        values = (const C*)s.texts[0].values[index] + head * s.texts[0].slots * m.width;
    }

    int64_t lowest(int64_t position) const {
        return layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0;
    }
    // Where the first row's part of a query head begins, in query and context alike.
    int64_t place(int64_t g) const { return first * m.heads * m.width + (head * group + g) * m.width; }
    float* scored(int64_t g) const { return scores + g * count * pitch; }

    void run() const {
        for (int64_t g = 0; g < group; g++)
            for (int64_t r = 0; r < count; r++)
                turn_query(query + place(g) + r * m.heads * m.width, positions[r] * m.width);
        Matrix some{nullptr, nullptr, nullptr, WIDE, m.width, FLOAT32};
        for (int64_t key = from; key < end; key += WIDE) {
            turn(keys + key * m.width, m.width, std::min<int64_t>(WIDE, end - key), turned);
            for (int64_t g = 0; g < group; g++)
                tile_of(count, some, 0, WIDE, turned, query + place(g), m.heads * m.width, 0,
                        {scored(g) + key - from, pitch, false});
        }
        for (int64_t g = 0; g < group; g++)
            for (int64_t r = 0; r < count; r++) weigh(scored(g) + r * pitch, positions[r]);
        for (int64_t column = 0; column < m.width; column += WIDE)
            for (int64_t key = from; key < end; key = (key / BLOCK + 1) * BLOCK) mix(column, key);
    }

    void turn_query(float* q, int64_t at) const {
        if (layer.q_norm) rms_norm(q, layer.q_norm, m.width, m.eps, q);
        rope(q, m.cos + at, m.sin + at, m.width, q);
    }

    // A row of scores to weights, zero where it does not look.
    void weigh(float* row, int64_t position) const {
        int64_t low = lowest(position) - from, seen = position + 1 - lowest(position);
        for (int64_t k = low; k < low + seen; k++) row[k] *= m.scale;
        float total = Attention<C>::softmax(row + low, seen);
        for (int64_t k = low; k < low + seen; k++) row[k] /= total;
        std::fill(row, row + low, 0.f);
        std::fill(row + low + seen, row + pitch, 0.f);
    }

    // The part of the context that values from `key` on give, to the end of their block.
    void mix(int64_t column, int64_t key) const {
        int64_t stop = std::min((key / BLOCK + 1) * BLOCK, end), wide = std::min<int64_t>(WIDE, m.width - column);
        for (int64_t k = key; k < stop; k++)
            for (int64_t i = 0; i < WIDE; i++)
                turned[(k - key) * WIDE + i] = i < wide ? one(values[k * m.width + column + i]) : 0.f;
        Matrix some{nullptr, nullptr, nullptr, wide, stop - key, FLOAT32};
        for (int64_t g = 0; g < group; g++)
            tile_of(count, some, 0, wide, turned, scored(g) + key - from, pitch, 0,
                    {context + place(g) + column, m.heads * m.width, key != from});
    }
};

}  // namespace
