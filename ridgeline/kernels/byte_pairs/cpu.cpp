// Byte-level BPE on one core: words (scan.h), their ids from a table of those seen before (words.h)
// or by merging (merge.h). Texts are a buffer with offsets, as Arrow has them; so are the ids.
#include <cstdint>
#include <cstring>
#include <vector>

#include "scan.h"
#include "words.h"

namespace byte_pairs {

struct Encoder {
    Scanner scanner;
    Merger merger;
    ShortWords short_words;
    LongWords long_words;

    // Room for `length` ids and INLINE_IDS more is at `out`.
    uint32_t* encode_word(const uint8_t* word, size_t length, const uint8_t* readable,
                          uint32_t* out) {
        if (length > INLINE_BYTES) return encode_long(word, length, out);
        const Key key = key_of(word, length, readable);
        const ShortWords::Slot& slot = short_words.slot_of(key);
        if (slot.high) {
            if (slot.count <= INLINE_IDS) {
                std::memcpy(out, slot.ids, sizeof(slot.ids));
            } else {
                std::memcpy(out, short_words.beside(slot), slot.count * sizeof(uint32_t));
            }
            return out + slot.count;
        }
        const std::vector<uint32_t>& ids = merger.ids_of(word, length);
        short_words.add(key, ids);
        return append(ids, out);
    }

    uint32_t* encode_long(const uint8_t* word, size_t length, uint32_t* out) {
        if (length > LONGEST) return append(merger.ids_of(word, length), out);
        const uint64_t hash = LongWords::hash_of(word, length);
        if (const LongWords::Slot* slot = long_words.find(word, length, hash)) {
            std::memcpy(out, long_words.ids(*slot), slot->count * sizeof(uint32_t));
            return out + slot->count;
        }
        const std::vector<uint32_t>& ids = merger.ids_of(word, length);
        long_words.add(word, length, hash, ids);
        return append(ids, out);
    }

    static uint32_t* append(const std::vector<uint32_t>& ids, uint32_t* out) {
        std::memcpy(out, ids.data(), ids.size() * sizeof(uint32_t));
        return out + ids.size();
    }

    template <int family>
    uint32_t* encode_text(const uint8_t* place, const uint8_t* end, const uint8_t* readable,
                          uint32_t* out) {
        while (place < end) {
            const uint8_t* behind = family == GPT2   ? scanner.next_gpt2(place, end)
                                    : family == GPT4 ? scanner.next_gpt4(place, end)
                                                     : scanner.next_gpt4o(place, end);
            out = encode_word(place, behind - place, readable, out);
            place = behind;
        }
        return out;
    }

    template <int family>
    int64_t encode_texts(const uint8_t* data, const int64_t* offsets, int64_t count, uint32_t* out,
                         int64_t* out_offsets) {
        uint32_t* const begin = out;
        const uint8_t* readable = data + offsets[count];
        scanner.bad = false;
        for (int64_t i = 0; i < count; ++i) {
            out_offsets[i] = out - begin;
            out = encode_text<family>(data + offsets[i], data + offsets[i + 1], readable, out);
            if (scanner.bad) return i;
        }
        out_offsets[count] = out - begin;
        return count;
    }
};

// Texts to look for, and what a byte or a character means for the tokenizer.
struct Survey {
    const uint8_t* needles;
    const int64_t* needle_offsets;
    int64_t num_needles;
    const uint8_t* is_missing;         // [256]: bytes without a token
    Table order;                       // of NFC: 255 may change; else the combining class
    uint8_t begins[256];               // 1: a needle's first byte
    std::vector<uint8_t> begins_with;  // [65536]: the first two, where it has two

    void note_beginnings() {
        begins_with.resize(1 << 16);
        for (int64_t n = 0; n < num_needles; ++n) {
            const uint8_t* needle = needles + needle_offsets[n];
            begins[needle[0]] = 1;
            const bool is_single = needle_offsets[n + 1] - needle_offsets[n] == 1;
            for (int second = 0; second < 256; ++second) {
                if (is_single || second == needle[1]) begins_with[needle[0] * 256 + second] = 1;
            }
        }
    }

    int64_t needle_at(const uint8_t* place, const uint8_t* end) const {
        if (end - place > 1 && !begins_with[place[0] * 256 + place[1]]) return num_needles;
        for (int64_t n = 0; n < num_needles; ++n) {
            const int64_t length = needle_offsets[n + 1] - needle_offsets[n];
            if (end - place >= length && !std::memcmp(place, needles + needle_offsets[n], length)) {
                return n;
            }
        }
        return num_needles;
    }

    // Whether composing may change the text: something that may compose, or marks out of order.
    bool may_change(const uint8_t* place, const uint8_t* end) const {
        uint8_t last = 0;
        bool bad = false;
        while (place < end) {
            if (*place < 0x80) {
                last = 0;
                ++place;
                continue;
            }
            int length;
            const uint8_t rank = order.of(decode(place, end, length, bad));
            if (rank == 255 || (rank && rank < last)) return true;
            last = rank;
            place += length;
        }
        return false;
    }
};

}  // namespace byte_pairs

using namespace byte_pairs;

extern "C" int ridgeline_byte_pairs_create(void** out, const void* rule, const void* index,
                                           const void* blocks, const void* byte_ids,
                                           const void* triples, int64_t num_pairs,
                                           const void* words, const void* word_offsets,
                                           const void* word_ids, int64_t num_words) {
    Scanner scanner{};
    std::memcpy(&scanner.rule, rule, sizeof(Rule));
    scanner.table = {static_cast<const uint16_t*>(index), static_cast<const uint8_t*>(blocks)};
    for (uint32_t code = 0; code < 128; ++code) scanner.ascii[code] = scanner.table.of(code);
    auto* encoder = new Encoder{scanner,
                                Merger(static_cast<const uint32_t*>(byte_ids),
                                       static_cast<const uint32_t*>(triples), num_pairs),
                                {},
                                {}};
    encoder->merger.take_whole(static_cast<const uint8_t*>(words),
                               static_cast<const int64_t*>(word_offsets),
                               static_cast<const uint32_t*>(word_ids), num_words);
    *out = encoder;
    return 0;
}

extern "C" int ridgeline_byte_pairs_free(void* encoder) {
    delete static_cast<Encoder*>(encoder);
    return 0;
}

// Into `out`, with room for an id for every byte and INLINE_IDS more. `done`: how many texts were
// encoded; the one behind them is no UTF-8.
extern "C" int ridgeline_byte_pairs_encode(void* handle, const void* data, const void* offsets,
                                           int64_t count, void* out, void* out_offsets,
                                           void* done) {
    auto& encoder = *static_cast<Encoder*>(handle);
    const auto run = encoder.scanner.rule.family == GPT2   ? &Encoder::encode_texts<GPT2>
                     : encoder.scanner.rule.family == GPT4 ? &Encoder::encode_texts<GPT4>
                                                           : &Encoder::encode_texts<GPT4O>;
    *static_cast<int64_t*>(done) =
        (encoder.*run)(static_cast<const uint8_t*>(data), static_cast<const int64_t*>(offsets),
                       count, static_cast<uint32_t*>(out), static_cast<int64_t*>(out_offsets));
    return 0;
}

// Of each text: how many bytes have no token, and whether composing its characters may change it.
// `hits` counts each needle in each text, [count, num_needles].
extern "C" int ridgeline_byte_pairs_survey(const void* data, const void* offsets, int64_t count,
                                           const void* needles, const void* needle_offsets,
                                           int64_t num_needles, const void* is_missing,
                                           const void* order_index, const void* order_blocks,
                                           void* missing, void* may_change, void* hits) {
    Survey survey{static_cast<const uint8_t*>(needles),
                  static_cast<const int64_t*>(needle_offsets),
                  num_needles,
                  static_cast<const uint8_t*>(is_missing),
                  {static_cast<const uint16_t*>(order_index),
                   static_cast<const uint8_t*>(order_blocks)},
                  {},
                  {}};
    survey.note_beginnings();
    uint8_t special[256];  // 1: a needle may begin; 2: without a token
    for (int byte = 0; byte < 256; ++byte) {
        special[byte] = survey.begins[byte] | (survey.is_missing[byte] ? 2 : 0);
    }
    const auto* bytes = static_cast<const uint8_t*>(data);
    const auto* places = static_cast<const int64_t*>(offsets);
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t *place = bytes + places[i], *end = bytes + places[i + 1];
        auto* counts = static_cast<int32_t*>(hits) + i * num_needles;
        int64_t lost = 0;
        for (const uint8_t* at = place; at < end; ++at) {
            if (!special[*at]) continue;
            lost += special[*at] >> 1;
            if (special[*at] & 1) {
                const int64_t needle = survey.needle_at(at, end);
                if (needle < num_needles) ++counts[needle];
            }
        }
        static_cast<int64_t*>(missing)[i] = lost;
        static_cast<uint8_t*>(may_change)[i] =
            survey.order.index != nullptr && survey.may_change(place, end);
    }
    return 0;
}
