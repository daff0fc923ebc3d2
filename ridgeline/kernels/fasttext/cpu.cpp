// fastText's prediction of one label on one core, for models with subwords and a tree of labels
// (hierarchical softmax): every sum in fastText's order, so that labels and scores are its own.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#pragma GCC optimize("fp-contract=off")  // a fused product would round once where fastText rounds twice

namespace fasttext {

constexpr uint32_t FNV_START = 2166136261u, FNV_PRIME = 16777619u;
constexpr int LONGEST_WORD = 1 << 15;  // bytes of a word that are looked at
constexpr std::string_view END_OF_TEXT = "</s>", LABEL = "__label__";

static inline uint32_t hashed(uint32_t hash, uint8_t byte) {
    return (hash ^ static_cast<uint32_t>(static_cast<int8_t>(byte))) * FNV_PRIME;
}

static inline bool separates(uint8_t c) {
    return c == ' ' || (c >= '\t' && c <= '\r') || c == 0;
}

struct Node {
    int32_t left = -1, right = -1;
    int64_t count = static_cast<int64_t>(1e15);
};

struct Model {
    int dim, min_chars, max_chars;
    uint32_t buckets;
    uint64_t magic;  // of the remainder by `buckets` (Lemire)
    int32_t num_words, num_labels;
    const float *rows, *outputs;  // [num_words + kept, dim], [num_labels, dim]; the caller keeps them
    std::vector<uint64_t> is_kept;  // a bit a bucket: it stays in the second cache
    std::vector<std::pair<uint32_t, int32_t>> slots;  // bucket + 1, its row
    uint32_t slot_mask;
    std::unordered_map<std::string_view, int32_t> words;
    std::vector<char> letters;
    std::vector<Node> tree;

    uint32_t bucket_of(uint32_t hash) const {
        const uint64_t low = magic * hash;
        return static_cast<uint32_t>((static_cast<unsigned __int128>(low) * buckets) >> 64);
    }
    int32_t row_of(uint32_t bucket) const {
        if (!(is_kept[bucket >> 6] >> (bucket & 63) & 1)) return -1;
        for (uint32_t at = bucket * 2654435761u >> 8 & slot_mask;; at = (at + 1) & slot_mask) {
            if (slots[at].first == bucket + 1) return slots[at].second;
        }
    }
    void keep(uint32_t bucket, int32_t row) {
        is_kept[bucket >> 6] |= uint64_t{1} << (bucket & 63);
        uint32_t at = bucket * 2654435761u >> 8 & slot_mask;
        while (slots[at].first && slots[at].first != bucket + 1) at = (at + 1) & slot_mask;
        slots[at] = {bucket + 1, row};
    }
    void grow_tree(const int64_t* counts) {  // Huffman's; counts fall
        tree.assign(2 * num_labels - 1, Node());
        for (int i = 0; i < num_labels; ++i) tree[i].count = counts[i];
        int leaf = num_labels - 1, node = num_labels;
        for (int i = num_labels; i < 2 * num_labels - 1; ++i) {
            int least[2];
            for (int& each : least) {
                each = leaf >= 0 && tree[leaf].count < tree[node].count ? leaf-- : node++;
            }
            tree[i] = {least[0], least[1], tree[least[0]].count + tree[least[1]].count};
        }
    }
};

struct Hidden {
    const Model& model;
    std::vector<float> sum;
    int64_t count = 0;

    explicit Hidden(const Model& model) : model(model), sum(model.dim) {}
    void add(int64_t row) {
        const float* from = model.rows + row * model.dim;
        float* to = sum.data();
        if (model.dim == 16) {
            for (int i = 0; i < 16; ++i) to[i] += from[i];
        } else {
            for (int i = 0; i < model.dim; ++i) to[i] += from[i];
        }
        ++count;
    }
    // `framed`: a word between < and >.
    void add_subwords(const uint8_t* framed, int size) {
        for (int begin = 0; begin < size; ++begin) {
            if ((framed[begin] & 0xC0) == 0x80) continue;
            uint32_t hash = FNV_START;
            for (int end = begin, n = 1; end < size && n <= model.max_chars; ++n) {
                hash = hashed(hash, framed[end++]);
                while (end < size && (framed[end] & 0xC0) == 0x80) hash = hashed(hash, framed[end++]);
                if (n < model.min_chars || (n == 1 && (begin == 0 || end == size))) continue;
                const int32_t row = model.row_of(model.bucket_of(hash));
                if (row >= 0) add(model.num_words + row);
            }
        }
    }
    void add_word(uint8_t* framed, int size) {  // framed[1..size]
        const std::string_view word(reinterpret_cast<char*>(framed + 1), size);
        const auto known = model.words.find(word);
        if (known != model.words.end()) {
            add(known->second);
            if (word == END_OF_TEXT) return;
        } else if (word.substr(0, LABEL.size()) == LABEL) {
            return;
        }
        framed[size + 1] = '>';
        add_subwords(framed, size + 2);
    }
};

static float log_of(float x) { return std::log(x + 1e-5); }

static void descend(const Model& model, int node, float score, const float* hidden, float& best,
                    int& label) {
    if (label >= 0 && score < best) return;
    const Node& own = model.tree[node];
    if (own.left < 0) {
        if (label < 0 || score > best) {
            best = score;
            label = node;
        }
        return;
    }
    const float* row = model.outputs + static_cast<int64_t>(node - model.num_labels) * model.dim;
    float f = 0;
    for (int i = 0; i < model.dim; ++i) f += row[i] * hidden[i];
    f = 1. / (1 + std::exp(-f));
    descend(model, own.left, score + log_of(1.0 - f), hidden, best, label);
    descend(model, own.right, score + log_of(f), hidden, best, label);
}

// The first `most_chars` characters of a text, line ends being spaces.
static void predict(const Model& model, const uint8_t* at, const uint8_t* end, int64_t most_chars,
                    int32_t* label, float* score) {
    Hidden hidden(model);
    uint8_t framed[LONGEST_WORD + 8];
    framed[0] = '<';
    int size = 0;
    bool ended = false;
    for (; at < end && !ended; ++at) {
        if ((*at & 0xC0) != 0x80 && most_chars-- == 0) break;
        if (!separates(*at)) {
            if (size < LONGEST_WORD) framed[1 + size++] = *at;
            continue;
        }
        if (size) hidden.add_word(framed, size);
        ended = std::string_view(reinterpret_cast<char*>(framed + 1), size) == END_OF_TEXT;
        size = 0;
    }
    if (size && !ended) {
        hidden.add_word(framed, size);
        ended = std::string_view(reinterpret_cast<char*>(framed + 1), size) == END_OF_TEXT;
    }
    if (!ended) {
        std::memcpy(framed + 1, END_OF_TEXT.data(), END_OF_TEXT.size());
        const auto known = model.words.find(END_OF_TEXT);
        if (known != model.words.end()) hidden.add(known->second);
    }
    *label = -1;
    *score = 0;
    if (!hidden.count) return;
    const float share = 1.0 / hidden.count;
    for (float& value : hidden.sum) value *= share;
    float best = 0;
    int found = -1;
    descend(model, 2 * model.num_labels - 2, 0.0f, hidden.sum.data(), best, found);
    *label = found;
    *score = std::exp(best);
}

}  // namespace fasttext

// `sizes`: dim, shortest and longest subwords, buckets, words, labels, kept buckets.
extern "C" int ridgeline_fasttext_create(void** handle, const int64_t* sizes, const float* rows,
                                         const float* outputs, const int64_t* label_counts,
                                         const uint8_t* words, const int64_t* word_offsets,
                                         const int32_t* kept) {
    auto* model = new fasttext::Model;
    model->dim = sizes[0], model->min_chars = sizes[1], model->max_chars = sizes[2];
    model->buckets = sizes[3], model->num_words = sizes[4], model->num_labels = sizes[5];
    model->magic = UINT64_MAX / model->buckets + 1;
    model->rows = rows, model->outputs = outputs;
    model->is_kept.resize(model->buckets / 64 + 1);
    uint32_t room = 1024;
    while (room < 2 * static_cast<uint64_t>(sizes[6])) room *= 2;
    model->slots.resize(room);
    model->slot_mask = room - 1;
    for (int64_t i = 0; i < sizes[6]; ++i) model->keep(kept[2 * i], kept[2 * i + 1]);
    model->letters.assign(words, words + word_offsets[model->num_words]);
    for (int32_t i = 0; i < model->num_words; ++i) {
        const size_t size = word_offsets[i + 1] - word_offsets[i];
        model->words.emplace(std::string_view(model->letters.data() + word_offsets[i], size), i);
    }
    model->grow_tree(label_counts);
    *handle = model;
    return 0;
}

extern "C" int ridgeline_fasttext_free(void* handle) {
    delete static_cast<fasttext::Model*>(handle);
    return 0;
}

// Label (-1: nothing to go by) and score of each text.
extern "C" int ridgeline_fasttext_predict(void* handle, const uint8_t* data, const int64_t* offsets,
                                          int64_t texts, int64_t most_chars, int32_t* labels,
                                          float* scores) {
    const auto& model = *static_cast<fasttext::Model*>(handle);
    for (int64_t i = 0; i < texts; ++i) {
        fasttext::predict(model, data + offsets[i], data + offsets[i + 1], most_chars, labels + i,
                          scores + i);
    }
    return 0;
}
