// Attention over pages on a CPU, as reference.py defines it, for prompts, pieces of prompts and
// single tokens alike: each sequence's new tokens are its last ones, and all are in the pages.
//
// An item of work is a few new tokens of a sequence with one KV head, so that the query heads which
// share it read its keys once. Keys and values come sixteen at a time, as fp32, and softmax is kept
// up to date page by page. A single token with many keys is cut at fixed positions and put together
// afterwards: no result depends on what else is in the batch. Places that hold no token of the
// sequence are not read.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "../host.h"

namespace ridgeline {

#define NOT_INLINED __attribute__((noinline))  // compiled once, not in each combination of dtypes

constexpr int64_t ROWS_AT_ONCE = 48;   // queries of an item: what it holds stays in the caches
constexpr int64_t SPLIT_KEYS = 1024;   // keys of an item of a single token
constexpr int64_t MAX_HEAD_DIM = 512;  // cpu.py asks for no more
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Shape {
    int64_t num_heads, num_kv_heads, head_dim, page_size, group;
    int64_t width;  // of a head in fp32: head_dim filled up to whole vectors, with zeros
    float scale, softcap;  // softcap 0: none
    int64_t window;        // 0: all that comes before is seen
};

struct Item {
    int64_t sequence, kv_head;
    int64_t first_token, num_tokens;  // among all of the step
    int64_t first_position;           // of the first token in its sequence
    int64_t first_key, end_key;
    int64_t partial;  // where its part of a cut sequence goes; -1: the result is whole
};

// A thread's own memory: R queries of an item, W wide, and S places of a page.
struct Scratch {
    std::vector<float> queries, sums, scores, most, total;  // [R, W], [R, W], [R, S], [R], [R]

    void reset(int64_t rows, int64_t width, int64_t page_size) {
        queries.resize(rows * width);
        sums.assign(rows * width, 0.0f);
        scores.resize(rows * page_size);
        most.assign(rows, NOTHING);
        total.assign(rows, 0.0f);
    }
};

// Sixteen vectors to one that holds their sums.
#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 12)
#define PAIR(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
static inline Floats halves(Floats a, Floats b) {
    return PAIR(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PAIR(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
static inline Floats quarters(Floats a, Floats b) {
    return PAIR(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           PAIR(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
static inline Floats eighths(Floats a, Floats b) {
    return PAIR(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           PAIR(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
static inline Floats last(Floats a, Floats b) {
    return PAIR(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           PAIR(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
static inline Floats sums_of(const Floats* v) {
    Floats four[4];
    for (int i = 0; i < 4; ++i) {
        four[i] = quarters(halves(v[4 * i], v[4 * i + 1]), halves(v[4 * i + 2], v[4 * i + 3]));
    }
    return last(eighths(four[0], four[1]), eighths(four[2], four[3]));
}
#else
static inline Floats sums_of(const Floats* v) {
    Floats result;
    for (int i = 0; i < LANES; ++i) result[i] = sum(v[i]);
    return result;
}
#endif

// Rows first … end - 1 of a block of sixteen as fp32; the others zero, unread.
template <class Kv>
NOT_INLINED static void widen(const Kv* rows, int64_t first, int64_t end, int64_t head_dim,
                              int64_t width, float* block) {
    if (first <= 0 && end >= LANES && head_dim == width) {
        for (int64_t i = 0; i < LANES * width; i += LANES) store(block + i, load(rows + i));
        return;
    }
    for (int64_t row = 0; row < LANES; ++row) {
        const bool held = row >= first && row < end;
        for (int64_t i = 0; i < width; i += LANES) {
            const Kv* from = rows + row * head_dim + i;
            const Floats lanes = held ? load(from, lanes_left(head_dim, i)) : Floats{};
            store(block + row * width + i, lanes);
        }
    }
}

// Scores of sixteen keys for each query. DIM: the width where it is known, else 0.
template <int DIM>
NOT_INLINED static void score_block(const float* queries, const float* keys, float* scores, int64_t rows,
                        int64_t width, int64_t page_size) {
    const int64_t size = DIM ? DIM : width;
    for (int64_t row = 0; row < rows; ++row) {
        Floats products[LANES];
        for (int key = 0; key < LANES; ++key) {
            Floats product = load(queries + row * size) * load(keys + key * size);
            for (int64_t i = LANES; i < size; i += LANES) {
                product += load(queries + row * size + i) * load(keys + key * size + i);
            }
            products[key] = product;
        }
        store(scores + row * page_size, sums_of(products));
    }
}

// Add sixteen values, each times its weight, to NUM queries' sums.
template <int NUM, int DIM>
NOT_INLINED static void add_values(const float* weights, int64_t page_size, const float* values, float* sums,
                       int64_t width) {
    constexpr int WIDTH = DIM && DIM * NUM <= 256 ? DIM : LANES;  // columns held in registers
    const int64_t size = DIM ? DIM : width;
    for (int64_t column = 0; column < size; column += WIDTH) {
        Floats held[NUM][WIDTH / LANES];
        for (int row = 0; row < NUM; ++row) {
            for (int i = 0; i < WIDTH / LANES; ++i) {
                held[row][i] = load(sums + row * size + column + i * LANES);
            }
        }
        for (int key = 0; key < LANES; ++key) {
            for (int i = 0; i < WIDTH / LANES; ++i) {
                const Floats value = load(values + key * size + column + i * LANES);
                for (int row = 0; row < NUM; ++row) {
                    held[row][i] += weights[row * page_size + key] * value;
                }
            }
        }
        for (int row = 0; row < NUM; ++row) {
            for (int i = 0; i < WIDTH / LANES; ++i) {
                store(sums + row * size + column + i * LANES, held[row][i]);
            }
        }
    }
}

template <int DIM>
static void add_block(const float* weights, int64_t page_size, const float* values, float* sums,
                      int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row += 4) {
        const float* own = weights + row * page_size;
        float* to = sums + row * width;
        const int64_t left = rows - row;
        if (left >= 4) add_values<4, DIM>(own, page_size, values, to, width);
        else if (left == 3) add_values<3, DIM>(own, page_size, values, to, width);
        else if (left == 2) add_values<2, DIM>(own, page_size, values, to, width);
        else add_values<1, DIM>(own, page_size, values, to, width);
    }
}

static inline bool all_finite(const float* block, int64_t count) {
    Floats zeros = {};
    for (int64_t i = 0; i < count; i += LANES) zeros += load(block + i) * 0.0f;
    return sum(zeros) == 0.0f;
}

// The same for a block that holds what is no number: nought times that is no number either, so a
// query leaves out what it does not see.
NOT_INLINED static void add_seen(const float* weights, int64_t page_size, const float* values,
                                 float* sums, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t key = 0; key < LANES; ++key) {
            const float weight = weights[row * page_size + key];
            if (weight == 0.0f) continue;
            for (int64_t i = 0; i < width; ++i) {
                sums[row * width + i] += weight * values[key * width + i];
            }
        }
    }
}

// From scores to weights on one page, places first … end - 1 of which are seen: softmax's maximum
// and total brought up to date, and how much what was summed before counts from now on.
NOT_INLINED static float weigh(float* scores, int64_t first, int64_t end, int64_t page_size, float softcap,
                   float& most, float& total) {
    static constexpr int32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Words lane_numbers;
    std::memcpy(&lane_numbers, NUMBERS, sizeof(lane_numbers));
    Floats highest = fill(NOTHING);
    for (int64_t i = first / LANES * LANES; i < end; i += LANES) {
        Floats lanes = load(scores + i);
        if (softcap != 0.0f) lanes = softcap * hyperbolic_tangent(lanes / softcap);
        const Words places = lane_numbers + static_cast<int32_t>(i);
        const Words seen =
            (places >= static_cast<int32_t>(first)) & (places < static_cast<int32_t>(end));
        lanes = pick(seen, lanes, fill(NOTHING));
        store(scores + i, lanes);
        highest = pick(lanes > highest, lanes, highest);
    }
    const float before = most;
    most = std::max(before, largest(highest));
    Floats added = {};
    for (int64_t i = 0; i < page_size; i += LANES) {
        Floats weights = {};
        if (i + LANES > first && i < end) {
            const Floats lanes = load(scores + i);
            weights = pick(lanes == fill(NOTHING), Floats{}, exponential(lanes - most));
        }
        added += weights;
        store(scores + i, weights);
    }
    const float kept = before == NOTHING ? 0.0f : exponential(fill(before - most))[0];
    total = total * kept + sum(added);
    return kept;
}

template <class Kv>
struct Cache {
    const Kv *keys, *values;
    const float *key_scales, *value_scales;  // null where pages hold values
};

// One page for all queries of an item: places first … end - 1.
template <class Kv>
NOT_INLINED static void attend_page(const Item& item, const Shape& shape, const Cache<Kv>& cache, int64_t line,
                        int64_t page_start, int64_t first, int64_t end, Scratch& own) {
    const int64_t rows = item.num_tokens * shape.group, size = shape.head_dim;
    const int64_t page_size = shape.page_size, wide = shape.width;
    auto scoring = wide == 64 ? score_block<64> : wide == 128 ? score_block<128> : score_block<0>;
    auto adding = wide == 64 ? add_block<64> : wide == 128 ? add_block<128> : add_block<0>;
    alignas(64) float block[LANES * MAX_HEAD_DIM];
    for (int64_t i = first / LANES * LANES; i < end; i += LANES) {
        widen(cache.keys + (line + i) * size, first - i, end - i, size, wide, block);
        scoring(own.queries.data(), block, own.scores.data() + i, rows, wide, page_size);
    }
    for (int64_t row = 0; row < rows; ++row) {
        float* scores = own.scores.data() + row * page_size;
        if (cache.key_scales) {
            for (int64_t i = first; i < end; ++i) scores[i] *= cache.key_scales[line + i];
        }
        const int64_t position = item.first_position + row / shape.group - page_start;
        const int64_t seen = shape.window ? std::max(first, position - shape.window + 1) : first;
        const int64_t until = std::min(end, position + 1);
        if (seen >= until) {
            std::fill(scores, scores + page_size, 0.0f);
            continue;
        }
        const float kept = weigh(scores, seen, until, page_size, shape.softcap, own.most[row],
                                 own.total[row]);
        if (cache.value_scales) {
            for (int64_t i = seen; i < until; ++i) scores[i] *= cache.value_scales[line + i];
        }
        if (kept != 1.0f) {
            float* sums = own.sums.data() + row * wide;
            for (int64_t i = 0; i < wide; i += LANES) store(sums + i, load(sums + i) * kept);
        }
    }
    for (int64_t i = first / LANES * LANES; i < end; i += LANES) {
        widen(cache.values + (line + i) * size, first - i, end - i, size, wide, block);
        // A single token sees every key of its item.
        const bool apart = item.num_tokens > 1 && !all_finite(block, LANES * wide);
        (apart ? add_seen : adding)(own.scores.data() + i, page_size, block, own.sums.data(), rows,
                                    wide);
    }
}

template <class T, class Kv>
static void attend_item(const Item& item, const Shape& shape, const Cache<Kv>& cache, const T* q,
                        const int32_t* table, T* out, float* partials, Scratch& own) {
    const int64_t rows = item.num_tokens * shape.group, size = shape.head_dim, wide = shape.width;
    own.reset(rows, wide, shape.page_size);
    auto place = [&](int64_t row) {
        const int64_t token = item.first_token + row / shape.group;
        const int64_t head = item.kv_head * shape.group + row % shape.group;
        return (token * shape.num_heads + head) * size;
    };
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < wide; i += LANES) {
            const Floats lanes = load(q + place(row) + i, lanes_left(size, i));
            store(own.queries.data() + row * wide + i, lanes * shape.scale);
        }
    }
    for (int64_t key = item.first_key; key < item.end_key;) {
        const int64_t page_start = key / shape.page_size * shape.page_size;
        const int64_t end = std::min(item.end_key - page_start, shape.page_size);
        const int64_t page = table[key / shape.page_size];
        const int64_t line = (page * shape.num_kv_heads + item.kv_head) * shape.page_size;
        attend_page(item, shape, cache, line, page_start, key - page_start, end, own);
        key = page_start + end;
    }
    for (int64_t row = 0; row < rows; ++row) {
        const float* sums = own.sums.data() + row * wide;
        if (item.partial >= 0) {
            float* to = partials + (item.partial * shape.group + row) * (wide + 2);
            std::copy(sums, sums + wide, to);
            to[wide] = own.most[row];
            to[wide + 1] = own.total[row];
            continue;
        }
        const float share = own.total[row] == 0.0f ? 0.0f : 1.0f / own.total[row];
        for (int64_t i = 0; i < wide; i += LANES) {
            store(out + place(row) + i, load(sums + i) * share, lanes_left(size, i));
        }
    }
}

// The parts of a cut sequence, for one query head, put together.
template <class T>
NOT_INLINED static void merge(const float* parts, int64_t count, int64_t stride, int64_t wide,
                              int64_t size, T* out) {
    float most = NOTHING, total = 0.0f;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, parts[i * stride + wide]);
    std::vector<float> sums(wide, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
        const float* part = parts + i * stride;
        const float share = exponential(fill(part[wide] - most))[0];
        total += share * part[wide + 1];
        for (int64_t j = 0; j < wide; ++j) sums[j] += share * part[j];
    }
    for (int64_t j = 0; j < wide; j += LANES) {
        store(out + j, load(sums.data() + j) / total, lanes_left(size, j));
    }
}

struct Cut {  // a single token whose keys were cut
    int64_t token, kv_head, first_partial, count;
};

NOT_INLINED static void plan(const int32_t* starts, const int32_t* totals, int64_t num_sequences,
                 const Shape& shape, std::vector<Item>& items, std::vector<Cut>& cuts) {
    const int64_t tokens_at_once = std::max<int64_t>(1, ROWS_AT_ONCE / shape.group);
    int64_t num_partials = 0;
    for (int64_t b = 0; b < num_sequences; ++b) {
        const int64_t count = starts[b + 1] - starts[b], before = totals[b] - count;
        for (int64_t token = 0; token < count; token += tokens_at_once) {
            const int64_t num = std::min(tokens_at_once, count - token);
            const int64_t position = before + token, end = position + num;
            const int64_t first =
                shape.window ? std::max<int64_t>(0, position - shape.window + 1) : 0;
            for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
                Item item = {b, head, starts[b] + token, num, position, first, end, -1};
                if (count > 1 || end - first <= SPLIT_KEYS) {
                    items.push_back(item);
                    continue;
                }
                cuts.push_back({item.first_token, head, num_partials, 0});
                for (int64_t key = first; key < end; key = item.end_key) {
                    item.first_key = key;
                    item.end_key = std::min(end, (key / SPLIT_KEYS + 1) * SPLIT_KEYS);
                    item.partial = num_partials++;
                    items.push_back(item);
                    ++cuts.back().count;
                }
            }
        }
    }
}

template <class T, class Kv>
static void attend(const T* q, T* out, const int32_t* starts, const int32_t* totals,
                   const int32_t* tables, int64_t table_stride, const Cache<Kv>& cache,
                   int64_t num_sequences, const Shape& shape, int threads) {
    std::vector<Item> items;
    std::vector<Cut> cuts;
    plan(starts, totals, num_sequences, shape, items, cuts);
    const int64_t stride = shape.width + 2;
    int64_t num_partials = cuts.empty() ? 0 : cuts.back().first_partial + cuts.back().count;
    std::vector<float> partials(num_partials * shape.group * stride);
    const int64_t num_items = static_cast<int64_t>(items.size());
    int64_t work = 0;  // elements of K and V times the queries that read them
    for (const Item& item : items) work += (item.end_key - item.first_key) * item.num_tokens;
    work *= shape.group * shape.width;
#pragma omp parallel num_threads(threads) if (work > 8 * WORTH_THREADS)
    {
        static thread_local Scratch own;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_items; ++i) {
            const int32_t* table = tables + items[i].sequence * table_stride;
            attend_item(items[i], shape, cache, q, table, out, partials.data(), own);
        }
    }
    for (const Cut& cut : cuts) {
        for (int64_t row = 0; row < shape.group; ++row) {
            const float* parts = partials.data() + (cut.first_partial * shape.group + row) * stride;
            const int64_t head = cut.kv_head * shape.group + row;
            T* to = out + (cut.token * shape.num_heads + head) * shape.head_dim;
            merge(parts, cut.count, shape.group * stride, shape.width, shape.head_dim, to);
        }
    }
}

}  // namespace ridgeline
