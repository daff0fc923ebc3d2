// Rows of a training batch out of mapped tokens: ids, the next token as a target, positions that
// restart with each document. One pass over 2 or 4 bytes a token in and 12 out.
#include <algorithm>
#include <cstdint>

namespace {

constexpr int32_t IGNORED = -100;  // a target that no loss counts

struct Piece {
    int64_t length;
    bool has_next;  // the token behind the piece is its last target
    const uint8_t* counted;
};

template <class Id>
Id pack_piece(const Id* __restrict from, const Piece& piece, int32_t* __restrict ids,
              int32_t* __restrict targets, int32_t* __restrict positions) {
    Id largest = 0;
    const int32_t last = static_cast<int32_t>(piece.length) - 1;
    for (int32_t i = 0; i < last; ++i) {
        ids[i] = static_cast<int32_t>(from[i]);
        targets[i] = static_cast<int32_t>(from[i + 1]);
        positions[i] = i;
        largest = from[i] > largest ? from[i] : largest;
    }
    ids[last] = static_cast<int32_t>(from[last]);
    positions[last] = last;
    targets[last] = piece.has_next ? static_cast<int32_t>(from[last + 1]) : IGNORED;
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

void fill_padding(int64_t length, int32_t id, int32_t* ids, int32_t* targets, int32_t* positions) {
    for (int32_t i = 0; i < length; ++i) {
        ids[i] = id;
        targets[i] = IGNORED;
        positions[i] = i;
    }
}

// What does not change from batch to batch: a corpus, and how it is cut into windows.
struct Tables {
    const int64_t* begins;  // [spans + 1]: of spans, counted in tokens of all spans in their order
    const int64_t* first;   // [spans]: the token of the corpus that each begins with
    const int64_t* limit;   // [spans]: tokens up to here go on with it
    int64_t num_spans;
    const int64_t* ends;  // [windows + 1], counted as `begins`; null: every `length` tokens
    int64_t length;
    const int64_t* bases;      // [shards + 1]: tokens of the corpus before each shard
    const int64_t* addresses;  // [shards]
    const int64_t* counted;    // [shards]: addresses of marks, 0 where all are learned
    int64_t num_shards;
    int64_t width;  // bytes of a token
    int64_t padding_id;
};

struct Row {
    int32_t *ids, *targets, *positions;
    int32_t* starts;
    int64_t* learned;  // of each piece: tokens up to its last target that counts
    int64_t num_tokens = 0, num_pieces = 0, num_targets = 0;
    int64_t largest = 0;
};

void begin_piece(Row& row, int64_t length, int64_t learned) {
    row.starts[row.num_pieces] = static_cast<int32_t>(row.num_tokens);
    row.learned[row.num_pieces++] = learned;
    row.num_tokens += length;
}

// Adds a piece's targets that count; up to which token there are some.
int64_t count_targets(const Piece& piece, int64_t& num_targets) {
    int64_t learned = piece.has_next ? piece.length : piece.length - 1;
    if (!piece.counted) {
        num_targets += learned;
        return learned;
    }
    while (learned && !piece.counted[learned]) --learned;
    for (int64_t i = 0; i < learned; ++i) num_targets += piece.counted[i + 1] != 0;
    return learned;
}

template <class Id>
void pack_window(const Tables& tables, int64_t window, Row& row) {
    const int64_t all = tables.begins[tables.num_spans];
    int64_t place = tables.ends ? tables.ends[window] : window * tables.length;
    const int64_t past = place + tables.length < all ? place + tables.length : all;
    const int64_t end = tables.ends ? tables.ends[window + 1] : past;
    const int64_t missing = tables.length - (end - place);
    const int64_t* behind = tables.begins + tables.num_spans + 1;
    for (int64_t span = std::upper_bound(tables.begins, behind, place) - tables.begins - 1;
         place < end; ++span) {
        const int64_t span_end = tables.begins[span + 1];
        const int64_t length = (span_end < end ? span_end : end) - place;
        if (!length) continue;
        const int64_t token = tables.first[span] + place - tables.begins[span];
        const int64_t* base = std::upper_bound(tables.bases, tables.bases + tables.num_shards, token);
        const int64_t shard = base - tables.bases - 1, local = token - tables.bases[shard];
        const int64_t marks = tables.counted[shard];
        const Piece piece{length, token + length < tables.limit[span],
                          marks ? reinterpret_cast<const uint8_t*>(marks) + local : nullptr};
        const Id largest = pack_piece(
            reinterpret_cast<const Id*>(tables.addresses[shard]) + local, piece,
            row.ids + row.num_tokens, row.targets + row.num_tokens, row.positions + row.num_tokens);
        row.largest = largest > row.largest ? largest : row.largest;
        begin_piece(row, length, count_targets(piece, row.num_targets));
        place += length;
    }
    if (missing > 0) {
        fill_padding(missing, static_cast<int32_t>(tables.padding_id), row.ids + row.num_tokens,
                     row.targets + row.num_tokens, row.positions + row.num_tokens);
        begin_piece(row, missing, 0);
    }
}

}  // namespace

// `rows`: ids, targets and positions, [3, count * length] of 32 bits: an id that does not fit is
// above every vocabulary, which `result` says. `starts` has room for a piece a token.
// So has `learned`, of each piece. `result`: how many pieces there are, the largest id, targets.
extern "C" int ridgeline_token_windows_pack(const void* tables, const void* windows, int64_t count,
                                            void* rows, void* starts, void* learned,
                                            void* result) {
    const auto& known = *static_cast<const Tables*>(tables);
    const auto* numbers = static_cast<const int64_t*>(windows);
    auto* ids = static_cast<int32_t*>(rows);
    const int64_t size = count * known.length;
    Row row{ids, ids + size, ids + 2 * size, static_cast<int32_t*>(starts),
            static_cast<int64_t*>(learned)};
    for (int64_t i = 0; i < count; ++i) {
        if (known.width == 2) {
            pack_window<uint16_t>(known, numbers[i], row);
        } else {
            pack_window<uint32_t>(known, numbers[i], row);
        }
    }
    row.starts[row.num_pieces] = static_cast<int32_t>(row.num_tokens);
    static_cast<int64_t*>(result)[0] = row.num_pieces;
    static_cast<int64_t*>(result)[1] = row.largest;
    static_cast<int64_t*>(result)[2] = row.num_targets;
    return 0;
}
