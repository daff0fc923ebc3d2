// Shingles and MinHash signatures on a CPU, as reference.py defines them: one core, documents end to
// end, no memory of its own but a block of hashes. Processes, not threads, share out the documents.
#include <algorithm>
#include <cstdint>

#ifdef __AVX512F__
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif

using Ints __attribute__((vector_size(REGISTER_BYTES))) = int32_t;
constexpr int WIDTH = REGISTER_BYTES / sizeof(int32_t);
constexpr int TOGETHER = 4;  // registers of minima that are updated in turn: a product takes ten cycles
constexpr int BLOCK = 512;  // shingles whose minima are taken together: they stay in the first cache
constexpr int LONGEST_NGRAM = 32;
constexpr uint64_t BASE = 0x9E3779B97F4A7C15, SPREAD = 0xD6E8FEB86659FD95;
constexpr uint64_t STEP = 0xA0761D6478BD642F;

static inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// What an ASCII byte adds to a word; 0: it separates, or is not ASCII.
struct Folded {
    uint8_t table[256] = {};
    constexpr Folded() {
        for (int c = '0'; c <= '9'; ++c) table[c] = c;
        for (int c = 'a'; c <= 'z'; ++c) table[c] = table[c - 32] = c;
    }
};
static constexpr Folded FOLDED;

// Sums up words to shingles, and gives each shingle's hash to `take`.
template <class Take>
struct Shingles {
    Take take;
    int ngram;
    uint64_t words[LONGEST_NGRAM] = {}, sum = 0, past = 1;
    int64_t count = 0;
    int place = 0;

    Shingles(Take take, int ngram) : take(take), ngram(ngram) {
        for (int i = 0; i < ngram; ++i) past *= SPREAD;
    }
    void word(uint64_t hash) {
        sum = sum * SPREAD + hash - words[place] * past;
        words[place] = hash;
        place = place + 1 == ngram ? 0 : place + 1;
        if (++count >= ngram) take(mixed(sum));
    }
    void finish() {
        if (count > 0 && count < ngram) take(mixed(sum));
    }
};

template <class Take>
static inline void each_shingle(const uint8_t* at, const uint8_t* end, int ngram, Take take) {
    Shingles<Take> shingles(take, ngram);
    uint64_t hash = 0;  // of the word so far; no byte of a word is 0, so neither is this of one byte
    bool inside = false;
    while (at < end) {
        const uint8_t c = *at, folded = FOLDED.table[c];
        if (folded) {
            hash = hash * BASE + folded;
            inside = true;
            ++at;
            continue;
        }
        if (c >= 0xC3 && c <= 0xDF) {  // two bytes that join
            hash = hash * BASE + c;
            inside = true;
            if (++at < end && (*at & 0xC0) == 0x80) hash = hash * BASE + *at++;
            continue;
        }
        if (inside) {
            shingles.word(hash);
            hash = 0;
            inside = false;
        }
        ++at;
        if (c < 0xE0) continue;
        const bool separates = c == 0xE2 || (c == 0xE3 && at < end && *at == 0x80);
        uint64_t alone = c;
        int left = c < 0xF0 ? 2 : 3;
        for (; left > 0 && at < end && (*at & 0xC0) == 0x80; --left) alone = alone * BASE + *at++;
        if (!separates && left == 0) shingles.word(alone);  // half a character would be too many words
    }
    if (inside) shingles.word(hash);
    shingles.finish();
}

// minima[p] = min(minima[p], factors[p] · x + terms[p]); `padded` permutations, a multiple of
// TOGETHER · WIDTH.
static void take_minima(const int32_t* low, int64_t count, const int32_t* factors,
                        const int32_t* terms, int64_t padded, int32_t* minima) {
    for (int64_t p = 0; p < padded; p += TOGETHER * WIDTH) {
        Ints factor[TOGETHER], term[TOGETHER], least[TOGETHER];
        __builtin_memcpy(factor, factors + p, sizeof(factor));
        __builtin_memcpy(term, terms + p, sizeof(term));
        __builtin_memcpy(least, minima + p, sizeof(least));
        for (int64_t i = 0; i < count; ++i) {
            const Ints x = Ints{} + low[i];
#pragma GCC unroll 4
            for (int k = 0; k < TOGETHER; ++k) {
                const Ints value = x * factor[k] + term[k];
                least[k] = value < least[k] ? value : least[k];
            }
        }
        __builtin_memcpy(minima + p, least, sizeof(least));
    }
}

// How many permutations there is to be room for in `factors`, `terms` and `scratch`.
extern "C" int ridgeline_minhash_padded(int permutations) {
    constexpr int STEP_SIZE = TOGETHER * WIDTH;
    return (permutations + STEP_SIZE - 1) / STEP_SIZE * STEP_SIZE;
}

extern "C" int ridgeline_minhash_signatures(
    const uint8_t* text, const int64_t* offsets, int64_t documents, int ngram,
    const int32_t* factors, const int32_t* terms, int64_t bands, int64_t rows, int32_t* scratch,
    int32_t* minima, int64_t* band_hashes, int64_t* counts) {
    const int64_t permutations = bands * rows, padded = ridgeline_minhash_padded(permutations);
    int32_t low[BLOCK];
    for (int64_t document = 0; document < documents; ++document) {
        int64_t count = 0;
        int waiting = 0;
        std::fill(scratch, scratch + padded, INT32_MAX);
        each_shingle(text + offsets[document], text + offsets[document + 1], ngram,
                     [&](uint64_t hash) {
                         low[waiting++] = static_cast<int32_t>(hash);
                         if (waiting < BLOCK) return;
                         take_minima(low, BLOCK, factors, terms, padded, scratch);
                         count += BLOCK;
                         waiting = 0;
                     });
        take_minima(low, waiting, factors, terms, padded, scratch);
        counts[document] = count + waiting;
        std::copy(scratch, scratch + permutations, minima + document * permutations);
        for (int64_t band = 0; band < bands; ++band) {
            uint64_t sum = 0;
            for (int64_t p = band * rows; p < (band + 1) * rows; ++p) {
                sum += mixed(static_cast<uint32_t>(scratch[p]) + (p + 1) * STEP);
            }
            band_hashes[document * bands + band] = static_cast<int64_t>(sum);
        }
    }
    return 0;
}

// All hashes of each document in their order, or (`as_sets`) each once and sorted as unsigned
// numbers; `hashes` has room for half as many as there are bytes and documents together.
extern "C" int ridgeline_minhash_shingles(const uint8_t* text, const int64_t* offsets,
                                          int64_t documents, int ngram, int as_sets,
                                          uint64_t* hashes, int64_t* starts) {
    uint64_t* next = hashes;
    starts[0] = 0;
    for (int64_t document = 0; document < documents; ++document) {
        uint64_t* const first = next;
        each_shingle(text + offsets[document], text + offsets[document + 1], ngram,
                     [&](uint64_t hash) { *next++ = hash; });
        if (as_sets) {
            std::sort(first, next);
            next = std::unique(first, next);
        }
        starts[document + 1] = next - hashes;
    }
    return 0;
}

// How many hashes two of the sets have in common, for each of `count` pairs of their numbers.
extern "C" int ridgeline_minhash_shared(const uint64_t* hashes, const int64_t* starts,
                                        const int64_t* pairs, int64_t count, int64_t* shared) {
    for (int64_t pair = 0; pair < count; ++pair) {
        const uint64_t* a = hashes + starts[pairs[2 * pair]];
        const uint64_t* const a_end = hashes + starts[pairs[2 * pair] + 1];
        const uint64_t* b = hashes + starts[pairs[2 * pair + 1]];
        const uint64_t* const b_end = hashes + starts[pairs[2 * pair + 1] + 1];
        int64_t both = 0;
        while (a < a_end && b < b_end) {  // without branches: which is next is as good as random
            const uint64_t one = *a, other = *b;
            both += one == other;
            a += one <= other;
            b += other <= one;
        }
        shared[pair] = both;
    }
    return 0;
}
