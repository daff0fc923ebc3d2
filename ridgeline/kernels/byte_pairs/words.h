// Words that were merged before, with their ids. Words of up to 15 bytes stand in the table itself
// with up to three ids, two in a cache line; longer ones and longer answers beside it. A table that
// is full is emptied and filled anew, so that memory is bounded and follows what is read.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "merge.h"

namespace byte_pairs {

constexpr size_t INLINE_BYTES = 15, INLINE_IDS = 3, LONGEST = 255;
constexpr size_t FIRST_SLOTS = 1 << 14, MOST_SLOTS = 1 << 20;  // 32 MB of short words at most
constexpr size_t MOST_LONG = 1 << 18, MOST_BESIDE = 1 << 23;   // 8 MB of slots; ids and bytes

struct Key {
    uint64_t low, high;  // the bytes, zeros behind them, and the length in the last one
};

inline Key key_of(const uint8_t* word, size_t length, const uint8_t* readable) {
    uint64_t parts[2] = {0, 0};
    if (readable - word >= 16) {
        std::memcpy(parts, word, 16);
        const int unused = static_cast<int>(8 * (length & 7));
        const uint64_t mask = (uint64_t{1} << unused) - 1;
        if (length < 8) {
            parts[0] &= mask;
            parts[1] = 0;
        } else {
            parts[1] &= mask;
        }
    } else {
        std::memcpy(parts, word, length);
    }
    return {parts[0], parts[1] | static_cast<uint64_t>(length) << 56};
}

class ShortWords {
public:
    struct Slot {
        uint64_t low = 0, high = 0;  // no word has length 0
        uint32_t count = 0;
        uint32_t ids[INLINE_IDS] = {0, 0, 0};  // the ids, or where they lie in `beside`
    };
    ShortWords() : slots_(FIRST_SLOTS) {}

    Slot& slot_of(const Key& key) {
        size_t place = mixed(key.low, key.high) & (slots_.size() - 1);
        while ((slots_[place].low != key.low || slots_[place].high != key.high) &&
               slots_[place].high) {
            place = (place + 1) & (slots_.size() - 1);
        }
        return slots_[place];
    }
    const uint32_t* beside(const Slot& slot) const { return beside_.data() + slot.ids[0]; }

    void add(const Key& key, const std::vector<uint32_t>& ids) {
        if (2 * (used_ + 1) > slots_.size()) make_room();
        if (beside_.size() + ids.size() > MOST_BESIDE) empty();
        Slot& slot = slot_of(key);
        slot.low = key.low;
        slot.high = key.high;
        slot.count = static_cast<uint32_t>(ids.size());
        if (ids.size() <= INLINE_IDS) {
            for (size_t i = 0; i < ids.size(); ++i) slot.ids[i] = ids[i];
        } else {
            slot.ids[0] = static_cast<uint32_t>(beside_.size());
            beside_.insert(beside_.end(), ids.begin(), ids.end());
        }
        ++used_;
    }

private:
    void make_room() {
        if (slots_.size() >= MOST_SLOTS) return empty();
        std::vector<Slot> old(2 * slots_.size());
        old.swap(slots_);
        for (const Slot& slot : old) {
            if (slot.high) slot_of({slot.low, slot.high}) = slot;
        }
    }
    void empty() {
        slots_.assign(slots_.size(), Slot{});
        beside_.clear();
        used_ = 0;
    }
    std::vector<Slot> slots_;
    std::vector<uint32_t> beside_;
    size_t used_ = 0;
};

class LongWords {
public:
    struct Slot {
        uint64_t hash = 0;
        uint32_t bytes = 0, length = 0, ids = 0, count = 0;
    };
    LongWords() : slots_(FIRST_SLOTS) {}

    static uint64_t hash_of(const uint8_t* word, size_t length) {
        uint64_t hash = length;
        for (size_t i = 0; i < length; i += 8) {
            uint64_t part = 0;
            std::memcpy(&part, word + i, length - i < 8 ? length - i : 8);
            hash = mixed(hash, part);
        }
        return hash;
    }
    const Slot* find(const uint8_t* word, size_t length, uint64_t hash) const {
        for (size_t place = hash & (slots_.size() - 1);; place = (place + 1) & (slots_.size() - 1)) {
            const Slot& slot = slots_[place];
            if (!slot.length) return nullptr;
            if (slot.hash == hash && slot.length == length &&
                !std::memcmp(bytes_.data() + slot.bytes, word, length)) return &slot;
        }
    }
    const uint32_t* ids(const Slot& slot) const { return ids_.data() + slot.ids; }

    void add(const uint8_t* word, size_t length, uint64_t hash, const std::vector<uint32_t>& ids) {
        const bool is_full = 2 * (used_ + 1) > slots_.size();
        if ((is_full && slots_.size() >= MOST_LONG) || bytes_.size() + length > MOST_BESIDE) {
            slots_.assign(slots_.size(), Slot{});
            bytes_.clear();
            ids_.clear();
            used_ = 0;
        } else if (is_full) {
            std::vector<Slot> old(2 * slots_.size());
            old.swap(slots_);
            for (const Slot& slot : old) {
                if (slot.length) free_slot(slot.hash) = slot;
            }
        }
        free_slot(hash) = {hash, static_cast<uint32_t>(bytes_.size()),
                           static_cast<uint32_t>(length), static_cast<uint32_t>(ids_.size()),
                           static_cast<uint32_t>(ids.size())};
        bytes_.insert(bytes_.end(), word, word + length);
        ids_.insert(ids_.end(), ids.begin(), ids.end());
        ++used_;
    }

private:
    Slot& free_slot(uint64_t hash) {
        size_t place = hash & (slots_.size() - 1);
        while (slots_[place].length) place = (place + 1) & (slots_.size() - 1);
        return slots_[place];
    }
    std::vector<Slot> slots_;
    std::vector<uint8_t> bytes_;
    std::vector<uint32_t> ids_;
    size_t used_ = 0;
};

}  // namespace byte_pairs
