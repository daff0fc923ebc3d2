// What the rules on quality count in a text, on one core: words, lines, and what comes again.
// data/corpus/stages/quality.py has the same as Polars expressions, which say what is right.
#include <cstdint>
#include <cstring>
#include <vector>

namespace text_counts {

constexpr uint8_t LETTER = 1, SPACE = 2, UNSPACED = 4;
constexpr int GRAM = 5;  // words
constexpr int SHORT_LINE = 30;  // characters

struct Classes {
    const uint16_t* index;
    const uint8_t* blocks;
    uint8_t of(uint32_t code) const { return blocks[index[code >> 8] * 256 + (code & 255)]; }
};

// As Python numbers the columns.
struct Counts {
    int64_t unspaced = 0, gaps = 0, worded = 0, spaces = 0, lines = 0, line_characters = 0,
            bullets = 0, ellipses = 0, ended_lines = 0, short_lines = 0, repeated_lines = 0,
            repeated_line_characters = 0, grams = 0, repeated_grams = 0;
};

static inline uint64_t folded(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

static inline uint64_t hash_of(const uint8_t* at, int64_t size) {
    uint64_t hash = folded(size ^ 0x9E3779B97F4A7C15u, 0xD6E8FEB86659FD93u);
    for (; size >= 8; size -= 8, at += 8) {
        uint64_t part;
        std::memcpy(&part, at, 8);
        hash = folded(hash ^ part, 0xA0761D6478BD642Fu);
    }
    if (size) {
        uint64_t part = 0;
        for (int i = 0; i < size; ++i) part |= static_cast<uint64_t>(at[i]) << (8 * i);
        hash = folded(hash ^ part, 0xA0761D6478BD642Fu);
    }
    return hash;
}

// Which hashes a text had before.
class Seen {
    std::vector<uint64_t> slots;
    uint64_t mask = 0;

public:
    void empty(int64_t most) {
        uint64_t room = 64;
        while (room < 2 * static_cast<uint64_t>(most)) room *= 2;
        slots.assign(room, 0);
        mask = room - 1;
    }
    bool again(uint64_t hash) {
        hash |= hash == 0;
        for (uint64_t at = (hash >> 20) & mask;; at = (at + 1) & mask) {
            if (slots[at] == hash) return true;
            if (!slots[at]) {
                slots[at] = hash;
                return false;
            }
        }
    }
};

// The character at `at`, which is inside a text in UTF-8, and how many bytes it has.
static inline uint32_t code_at(const uint8_t* at, const uint8_t* end, int& size) {
    const uint8_t c = *at;
    size = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    if (size == 1) return c;
    if (end - at < size) {
        size = static_cast<int>(end - at);
        return 0;
    }
    uint32_t code = c & (0x7F >> size);
    for (int i = 1; i < size; ++i) code = code << 6 | (at[i] & 0x3F);
    return code < 0x110000 ? code : 0;
}

static inline bool is_blank(uint8_t c) { return c == ' ' || c == '\n' || c == '\t'; }

static void count_words(const uint8_t* at, const uint8_t* end, const Classes& classes,
                        const uint8_t* ascii, Counts& counts) {
    bool in_gap = false, in_word = false;  // `in_word`: a letter has come since the last space
    while (at < end) {
        uint8_t own;
        bool blank = false;
        if (*at < 0x80) {
            own = ascii[*at];
            blank = is_blank(*at++);
        } else {
            int size;
            own = classes.of(code_at(at, end, size));
            at += size;
        }
        counts.spaces += blank;
        counts.gaps += blank && !in_gap;
        in_gap = blank;
        const bool letter = own & LETTER, space = own & SPACE;
        counts.worded += letter && !in_word;
        in_word = (in_word || letter) && !space;
        counts.unspaced += (own & UNSPACED) != 0;
    }
}

static bool begins_with_bullet(const uint8_t* at, const uint8_t* end, const Classes& classes) {
    while (at < end) {
        int size;
        const uint32_t code = code_at(at, end, size);
        switch (code) {
            case '-': case '*': case 0x2022: case 0x2023: case 0x25CF: case 0x25E6: case 0x25AA:
            case 0xB7: case 0x2013:
                return true;
        }
        if (!(classes.of(code) & SPACE)) return false;
        at += size;
    }
    return false;
}

static inline bool ends_with(const uint8_t* begin, const uint8_t* end, const char* mark, int size) {
    return end - begin >= size && !std::memcmp(end - size, mark, size);
}

static bool ends_a_line(const uint8_t* begin, const uint8_t* end) {
    const uint8_t last = end[-1];
    if (last < 0x80) {
        return last == '.' || last == '!' || last == '?' || last == '"' || last == ')';
    }
    for (const char* mark : {"\u3002", "\uff01", "\uff1f", "\u2026", "\u201d", "\u2019"}) {
        if (ends_with(begin, end, mark, 3)) return true;
    }
    return false;
}

static void count_lines(const uint8_t* at, const uint8_t* end, const Classes& classes, Seen& seen,
                        Counts& counts) {
    while (at < end) {
        const auto* stop = static_cast<const uint8_t*>(std::memchr(at, '\n', end - at));
        if (!stop) stop = end;
        if (stop > at) {
            int64_t size = 0;
            for (const uint8_t* each = at; each < stop; ++each) size += (*each & 0xC0) != 0x80;
            const bool again = seen.again(hash_of(at, stop - at));
            ++counts.lines;
            counts.line_characters += size;
            counts.bullets += begins_with_bullet(at, stop, classes);
            counts.ellipses += ends_with(at, stop, "...", 3) || ends_with(at, stop, "\u2026", 3);
            counts.ended_lines += ends_a_line(at, stop);
            counts.short_lines += size <= SHORT_LINE;
            counts.repeated_lines += again;
            counts.repeated_line_characters += again ? size : 0;
        }
        at = stop + 1;
    }
}

// Words of this are what single spaces part, empty ones too.
static void count_grams(const uint8_t* at, const uint8_t* end, Seen& seen, Counts& counts) {
    uint64_t words[GRAM] = {};
    int64_t count = 0;
    for (bool is_last = false; !is_last;) {
        const uint8_t* stop = at;
        while (stop < end && *stop != ' ') ++stop;
        is_last = stop == end;
        std::memmove(words, words + 1, sizeof(words) - sizeof(*words));
        words[GRAM - 1] = hash_of(at, stop - at);
        at = stop + 1;
        if (++count < GRAM) continue;
        uint64_t gram = 0;
        for (const uint64_t word : words) gram = gram * 0x9E3779B97F4A7C15u + word;
        ++counts.grams;
        counts.repeated_grams += seen.again(folded(gram, 0xD6E8FEB86659FD93u));
    }
}

}  // namespace text_counts

// Of each text, a row of Counts.
extern "C" int ridgeline_text_counts_count(const uint8_t* data, const int64_t* offsets,
                                           int64_t texts, const uint16_t* index,
                                           const uint8_t* blocks, int64_t* rows) {
    using namespace text_counts;
    const Classes classes{index, blocks};
    uint8_t ascii[128];
    for (int code = 0; code < 128; ++code) ascii[code] = classes.of(code);
    Seen lines, grams;
    for (int64_t text = 0; text < texts; ++text) {
        const uint8_t *begin = data + offsets[text], *end = data + offsets[text + 1];
        Counts counts;
        count_words(begin, end, classes, ascii, counts);
        int64_t most_lines = 1, most_words = 1;
        for (const uint8_t* at = begin; at < end; ++at) {
            most_lines += *at == '\n';
            most_words += *at == ' ';
        }
        lines.empty(most_lines);
        count_lines(begin, end, classes, lines, counts);
        grams.empty(most_words);
        count_grams(begin, end, grams, counts);
        std::memcpy(rows + text * (sizeof(Counts) / sizeof(int64_t)), &counts, sizeof(Counts));
    }
    return 0;
}
