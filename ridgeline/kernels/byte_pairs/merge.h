// A word's ids: its bytes, joined pair by pair, of the pairs that may join the one that was learned
// first, of several such the leftmost. Bytes without an id of their own are left out, and what stood
// on both sides of them are neighbours, as in the `tokenizers` library.
#pragma once

#include <cstdint>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace byte_pairs {

constexpr uint32_t NONE = UINT32_MAX;
constexpr int SHORT = 64;  // ids: up to here looking at every pair is faster than a heap

struct Joined {
    uint32_t rank = NONE;
    uint32_t id = NONE;
};

inline uint64_t mixed(uint64_t a, uint64_t b) {
    const unsigned __int128 product =
        static_cast<unsigned __int128>(a ^ 0x9E3779B97F4A7C15u) * (b ^ 0xD1B54A32D192ED03u);
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

class Pairs {
public:
    Pairs(const uint32_t* triples, int64_t count) {
        while (static_cast<int64_t>(slots_.size()) < 2 * count + 2) {
            slots_.resize(slots_.empty() ? 64 : 2 * slots_.size());
        }
        for (int64_t rank = 0; rank < count; ++rank) {
            const uint32_t* triple = triples + 3 * rank;
            const uint64_t key = key_of(triple[0], triple[1]);
            Slot& slot = slots_[place_of(key)];
            slot.key = key;
            slot.joined = {static_cast<uint32_t>(rank), triple[2]};
        }
    }
    Joined of(uint32_t left, uint32_t right) const {
        return slots_[place_of(key_of(left, right))].joined;
    }

private:
    struct Slot {
        uint64_t key = UINT64_MAX;
        Joined joined;
    };
    static uint64_t key_of(uint32_t left, uint32_t right) {
        return static_cast<uint64_t>(left) << 32 | right;
    }
    size_t place_of(uint64_t key) const {
        size_t place = mixed(key, 0) & (slots_.size() - 1);
        while (slots_[place].key != key && slots_[place].key != UINT64_MAX) {
            place = (place + 1) & (slots_.size() - 1);
        }
        return place;
    }
    std::vector<Slot> slots_;
};

class Merger {
public:
    Merger(const uint32_t* byte_ids, const uint32_t* triples, int64_t num_pairs)
        : pairs_(triples, num_pairs), byte_ids_(byte_ids, byte_ids + 256) {}

    // Words that are a token, taken whole before any pair is looked at.
    void take_whole(const uint8_t* data, const int64_t* offsets, const uint32_t* ids, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            const char* from = reinterpret_cast<const char*>(data);
            whole_.emplace(std::string(from + offsets[i], from + offsets[i + 1]), ids[i]);
        }
    }

    // The ids, which stay until the next word.
    const std::vector<uint32_t>& ids_of(const uint8_t* word, size_t length) {
        ids_.clear();
        if (!whole_.empty()) {
            const auto token = whole_.find(std::string(reinterpret_cast<const char*>(word), length));
            if (token != whole_.end()) {
                ids_.push_back(token->second);
                return ids_;
            }
        }
        for (size_t i = 0; i < length; ++i) {
            if (byte_ids_[word[i]] != NONE) ids_.push_back(byte_ids_[word[i]]);
        }
        if (ids_.size() > SHORT) {
            merge_long();
        } else if (ids_.size() > 1) {
            merge_short();
        }
        return ids_;
    }

private:
    void merge_short() {
        Joined joins[SHORT];
        size_t size = ids_.size();
        for (size_t i = 0; i + 1 < size; ++i) joins[i] = pairs_.of(ids_[i], ids_[i + 1]);
        while (size > 1) {
            size_t best = 0;
            for (size_t i = 1; i + 1 < size; ++i) {
                if (joins[i].rank < joins[best].rank) best = i;
            }
            if (joins[best].rank == NONE) break;
            ids_[best] = joins[best].id;
            for (size_t i = best + 1; i + 1 < size; ++i) {
                ids_[i] = ids_[i + 1];
                joins[i - 1] = joins[i];
            }
            // joins[best] is now the pair behind; it and the one before have a new neighbour
            --size;
            if (best + 1 < size) joins[best] = pairs_.of(ids_[best], ids_[best + 1]);
            if (best > 0) joins[best - 1] = pairs_.of(ids_[best - 1], ids_[best]);
        }
        ids_.resize(size);
    }

    struct Candidate {
        uint32_t rank;
        uint32_t left;
        uint32_t right;
        uint32_t id;
        uint32_t left_id, right_id;  // what they were then
        bool operator<(const Candidate& other) const {  // the best is the largest
            return rank != other.rank ? rank > other.rank : left > other.left;
        }
    };

    void merge_long() {
        const uint32_t size = static_cast<uint32_t>(ids_.size());
        next_.resize(size);
        before_.resize(size);
        for (uint32_t i = 0; i < size; ++i) {
            next_[i] = i + 1 < size ? i + 1 : NONE;
            before_[i] = i ? i - 1 : NONE;
        }
        std::priority_queue<Candidate> heap;
        const auto offer = [&](uint32_t left) {
            const uint32_t right = left == NONE ? NONE : next_[left];
            if (right == NONE) return;
            const Joined joined = pairs_.of(ids_[left], ids_[right]);
            if (joined.rank == NONE) return;
            heap.push({joined.rank, left, right, joined.id, ids_[left], ids_[right]});
        };
        for (uint32_t i = 0; i + 1 < size; ++i) offer(i);
        while (!heap.empty()) {
            const Candidate best = heap.top();
            heap.pop();
            const bool holds = ids_[best.left] == best.left_id && next_[best.left] == best.right &&
                               ids_[best.right] == best.right_id;
            if (!holds) continue;
            ids_[best.left] = best.id;
            ids_[best.right] = NONE;
            next_[best.left] = next_[best.right];
            if (next_[best.right] != NONE) before_[next_[best.right]] = best.left;
            offer(best.left);
            offer(before_[best.left]);
        }
        size_t kept = 0;
        for (uint32_t i = 0; i != NONE; i = next_[i]) ids_[kept++] = ids_[i];
        ids_.resize(kept);
    }

    Pairs pairs_;
    std::vector<uint32_t> byte_ids_;
    std::unordered_map<std::string, uint32_t> whole_;
    std::vector<uint32_t> ids_, next_, before_;
};

}  // namespace byte_pairs
