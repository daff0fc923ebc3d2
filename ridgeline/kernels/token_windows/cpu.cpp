// Rows of a training batch out of mapped tokens: ids, the next token as a target, positions that
// restart with each document. One pass over 2 or 4 bytes a token in and 24 out.
#include <cstdint>

namespace {

constexpr int64_t IGNORED = -100;  // a target that no loss counts

struct Piece {
    int64_t length;
    bool has_next;  // the token behind the piece is its last target
    const uint8_t* counted;
};

template <class Id>
Id pack_piece(const Id* __restrict from, const Piece& piece, int64_t* __restrict ids,
              int64_t* __restrict targets, int64_t* __restrict positions) {
    Id largest = 0;
    const int64_t last = piece.length - 1;
    for (int64_t i = 0; i < last; ++i) {
        ids[i] = from[i];
        targets[i] = from[i + 1];
        positions[i] = i;
        largest = from[i] > largest ? from[i] : largest;
    }
    ids[last] = from[last];
    positions[last] = last;
    targets[last] = piece.has_next ? static_cast<int64_t>(from[last + 1]) : IGNORED;
    if (piece.counted) {
        const int64_t num_targets = piece.has_next ? piece.length : last;
        for (int64_t i = 0; i < num_targets; ++i) {
            if (!piece.counted[i + 1]) targets[i] = IGNORED;
        }
    }
    largest = from[last] > largest ? from[last] : largest;
    if (piece.has_next && from[last + 1] > largest) largest = from[last + 1];
    return largest;
}

void fill_padding(int64_t length, int64_t id, int64_t* ids, int64_t* targets, int64_t* positions) {
    for (int64_t i = 0; i < length; ++i) {
        ids[i] = id;
        targets[i] = IGNORED;
        positions[i] = i;
    }
}

template <class Id>
int64_t pack(const int64_t* from, const int64_t* counted, const int64_t* lengths,
             const uint8_t* has_next, const uint8_t* is_padding, int64_t num_pieces,
             int64_t padding_id, int64_t* ids, int64_t* targets, int64_t* positions) {
    Id largest = 0;
    for (int64_t i = 0, place = 0; i < num_pieces; place += lengths[i], ++i) {
        int64_t *own_ids = ids + place, *own_targets = targets + place;
        if (is_padding[i]) {
            fill_padding(lengths[i], padding_id, own_ids, own_targets, positions + place);
            continue;
        }
        const auto* marks = counted ? reinterpret_cast<const uint8_t*>(counted[i]) : nullptr;
        const Piece piece{lengths[i], has_next[i] != 0, marks};
        const Id own = pack_piece(reinterpret_cast<const Id*>(from[i]), piece, own_ids, own_targets,
                                  positions + place);
        largest = own > largest ? own : largest;
    }
    return largest;
}

}  // namespace

// `from` and `counted` are addresses of each piece's first token, of `width` bytes, and of its mark
// (0 where all are learned). `largest` is the largest id.
extern "C" int ridgeline_token_windows_pack(const void* from, const void* counted,
                                            const void* lengths, const void* has_next,
                                            const void* is_padding, int64_t num_pieces,
                                            int64_t width, int64_t padding_id, void* ids,
                                            void* targets, void* positions, void* largest) {
    const auto run = width == 2 ? pack<uint16_t> : pack<uint32_t>;
    *static_cast<int64_t*>(largest) =
        run(static_cast<const int64_t*>(from), static_cast<const int64_t*>(counted),
            static_cast<const int64_t*>(lengths), static_cast<const uint8_t*>(has_next),
            static_cast<const uint8_t*>(is_padding), num_pieces, padding_id,
            static_cast<int64_t*>(ids), static_cast<int64_t*>(targets),
            static_cast<int64_t*>(positions));
    return 0;
}
