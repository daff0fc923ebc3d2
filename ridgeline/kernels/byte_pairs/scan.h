// Where words end: the pre-tokenizer regexes of GPT-2, GPT-4 (Llama 3, Qwen) and GPT-4o written out
// as scanners over UTF-8. A character's classes come from a table that the caller made, so that they
// are those of the regex library whose words these have to be. Backtracking is spelled out where a
// regex would do it: `\s+(?!\S)` leaves the last space of a run to the word behind it.
#pragma once

#include <cstdint>
#include <cstring>

namespace byte_pairs {

enum Class : uint8_t {
    LETTER = 1,   // \p{L}
    NUMBER = 2,   // \p{N}
    SPACE = 4,    // \s
    ALONE = 8,    // a word by itself, which ends the text before it (digits, in some rules)
    MARK = 16,    // \p{M}
    CAPITAL = 32, // \p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}
    SMALL = 64,   // \p{Ll}\p{Lm}\p{Lo}\p{M}
};

enum Family : int32_t { GPT2 = 0, GPT4 = 1, GPT4O = 2 };

struct Rule {
    int32_t family;
    int32_t letters;       // classes that make a word of letters
    int32_t max_digits;    // of a number (GPT4, GPT4O)
    int32_t contractions;  // GPT4O: words keep 's and the like
    int32_t slash_tail;    // GPT4O: signs keep the slashes behind them, as they keep line ends
};

// Two steps: which block a character's is, then the character in it.
struct Table {
    const uint16_t* index;  // [0x1100]
    const uint8_t* blocks;  // [blocks, 256]
    uint8_t of(uint32_t code) const { return blocks[index[code >> 8] * 256 + (code & 255)]; }
};

struct Character {
    uint8_t classes;
    int length;  // bytes; 0 behind the end
    uint32_t code;
};

// One character; `bad` is set where the bytes are no UTF-8, which then counts as one byte of a sign.
inline uint32_t decode(const uint8_t* at, const uint8_t* end, int& length, bool& bad) {
    const uint32_t lead = *at;
    length = 1;
    if (lead < 0x80) return lead;
    const int wanted = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || end - at < wanted) {
        bad = true;
        return 0xFFFD;
    }
    uint32_t code = lead & (0x7F >> wanted);
    for (int i = 1; i < wanted; ++i) {
        if ((at[i] & 0xC0) != 0x80) {
            bad = true;
            return 0xFFFD;
        }
        code = code << 6 | (at[i] & 0x3F);
    }
    if (code > 0x10FFFF) {
        bad = true;
        return 0xFFFD;
    }
    length = wanted;
    return code;
}

struct Scanner {
    Rule rule;
    Table table;
    uint8_t ascii[128];
    bool bad = false;

    using Bytes = const uint8_t*;

    Character at(Bytes place, Bytes end) {
        if (place >= end) return {SPACE | ALONE, 0, 0};
        if (*place < 0x80) return {ascii[*place], 1, *place};
        Character c;
        c.code = decode(place, end, c.length, bad);
        c.classes = table.of(c.code);
        return c;
    }

    // Behind the characters from `place` on that have one of the classes `with` and none of `without`.
    Bytes run(Bytes place, Bytes end, uint8_t with, uint8_t without) {
        while (place < end) {
            if (*place < 0x80) {
                const uint8_t classes = ascii[*place];
                if (!(classes & with) || (classes & without)) return place;
                ++place;
            } else {
                const Character c = at(place, end);
                if (!(c.classes & with) || (c.classes & without)) return place;
                place += c.length;
            }
        }
        return place;
    }

    // Letters: eight bytes at once while all are of the Latin alphabet.
    Bytes letters(Bytes place, Bytes end) {
        constexpr uint64_t ONES = 0x0101010101010101u, HIGH = ONES << 7;
        while (end - place >= 8) {
            uint64_t bytes;
            std::memcpy(&bytes, place, 8);
            const uint64_t lower = (bytes | ONES * 0x20) & ~HIGH;
            // bit 7 of each byte that is at least 'a', and of each past 'z'
            const uint64_t from = lower + ONES * (0x80 - 'a'), past = lower + ONES * (0x7F - 'z');
            const uint64_t others = ~(from & ~past & ~bytes) & HIGH;
            if (others) {
                place += __builtin_ctzll(others) >> 3;
                if (*place < 0x80 && !(ascii[*place] & rule.letters)) return place;
                break;
            }
            place += 8;
        }
        return run(place, end, rule.letters, ALONE);
    }

    bool is_sign(const Character& c) const {
        return c.length && !(c.classes & (SPACE | NUMBER | ALONE | rule.letters));
    }

    Bytes signs(Bytes place, Bytes end) {
        while (place < end) {
            const Character c = at(place, end);
            if (!is_sign(c)) return place;
            place += c.length;
        }
        return place;
    }

    // Behind 's, 't, 're, 've, 'm, 'll or 'd; null where there is none.
    Bytes contraction(Bytes place, Bytes end, bool any_case) {
        if (end - place < 2 || *place != '\'') return nullptr;
        // U+017F, a long s, is an s to a regex that ignores case
        if (any_case && end - place >= 3 && place[1] == 0xC5 && place[2] == 0xBF) return place + 3;
        const uint8_t fold = any_case ? 0x20 : 0;
        const uint8_t first = place[1] | fold;
        if (first == 's' || first == 't' || first == 'm' || first == 'd') return place + 2;
        if (end - place < 3) return nullptr;
        const uint8_t second = place[2] | fold;
        const bool two = (second == 'e' && (first == 'r' || first == 'v')) ||
                         (second == 'l' && first == 'l');
        return two ? place + 3 : nullptr;
    }

    // A run of spaces without the last one, which belongs to what follows, if something does.
    Bytes spaces(Bytes place, Bytes end) {
        Bytes last = place, behind = place;
        while (behind < end) {
            const Character c = at(behind, end);
            if (!(c.classes & SPACE) || (c.classes & ALONE)) break;
            last = behind;
            behind += c.length;
        }
        const bool ends = !at(behind, end).length || (at(behind, end).classes & ALONE);
        return ends || last == place ? behind : last;
    }

    // Behind the last line end of a run of spaces; null where it has none.
    Bytes line_ends(Bytes place, Bytes end) {
        Bytes behind_last = nullptr;
        while (place < end) {
            const Character c = at(place, end);
            if (!(c.classes & SPACE) || (c.classes & ALONE)) break;
            place += c.length;
            if (c.code == '\r' || c.code == '\n') behind_last = place;
        }
        return behind_last;
    }

    Bytes tail(Bytes place, Bytes end) const {
        while (place < end && (*place == '\r' || *place == '\n' ||
                               (rule.slash_tail && *place == '/'))) ++place;
        return place;
    }

    Bytes digits(Bytes place, Bytes end) {
        for (int i = 0; i < rule.max_digits; ++i) {
            const Character c = at(place, end);
            if (!c.length || !(c.classes & NUMBER)) break;
            place += c.length;
        }
        return place;
    }

    Bytes next_gpt2(Bytes place, Bytes end) {
        Character c = at(place, end);
        if (c.classes & ALONE) return place + c.length;
        if (c.code == '\'') {
            if (Bytes behind = contraction(place, end, false)) return behind;
        }
        Bytes from = place;
        if (c.code == ' ') {
            const Character behind = at(place + 1, end);
            if (behind.classes & (SPACE | ALONE)) return spaces(place, end);
            from = place + 1;
            c = behind;
        }
        if (c.classes & rule.letters) return letters(from, end);
        if (c.classes & NUMBER) return run(from, end, NUMBER, ALONE);
        if (c.classes & SPACE) return spaces(place, end);
        return signs(from, end);
    }

    Bytes next_gpt4(Bytes place, Bytes end) {
        const Character c = at(place, end);
        if (c.classes & rule.letters) return letters(place, end);
        if (c.code == '\'') {
            if (Bytes behind = contraction(place, end, true)) return behind;
        }
        if (c.classes & NUMBER) return digits(place, end);
        const Character second = at(place + c.length, end);
        if (second.length && (second.classes & rule.letters) && c.code != '\r' && c.code != '\n') {
            return letters(place + c.length, end);
        }
        return signs_or_spaces(place, end, c, second);
    }

    Bytes signs_or_spaces(Bytes place, Bytes end, const Character& c, const Character& second) {
        if (is_sign(c)) return tail(signs(place, end), end);
        if (c.code == ' ' && is_sign(second)) return tail(signs(place + 1, end), end);
        if (Bytes behind = line_ends(place, end)) return behind;
        return spaces(place, end);
    }

    // CAPITAL* SMALL+, the longest first: what is both may be given back by the first part.
    Bytes capitalized(Bytes place, Bytes end) {
        Bytes behind_both = nullptr, now = place;
        Character c = at(now, end);
        while (c.length && (c.classes & CAPITAL)) {
            now += c.length;
            if (c.classes & SMALL) behind_both = now;
            c = at(now, end);
        }
        if (c.length && (c.classes & SMALL)) return run(now, end, SMALL, 0);
        return behind_both;
    }

    Bytes capitals(Bytes place, Bytes end) {
        Bytes behind = run(place, end, CAPITAL, 0);
        return behind == place ? nullptr : run(behind, end, SMALL, 0);
    }

    Bytes next_gpt4o(Bytes place, Bytes end) {
        const Character c = at(place, end);
        const bool may_lead = !(c.classes & (LETTER | NUMBER)) && c.code != '\r' && c.code != '\n';
        Bytes behind = may_lead ? capitalized(place + c.length, end) : nullptr;
        if (!behind) behind = capitalized(place, end);
        if (!behind && may_lead) behind = capitals(place + c.length, end);
        if (!behind) behind = capitals(place, end);
        if (behind) {
            Bytes longer = rule.contractions ? contraction(behind, end, true) : nullptr;
            return longer ? longer : behind;
        }
        if (c.classes & NUMBER) return digits(place, end);
        return signs_or_spaces(place, end, c, at(place + c.length, end));
    }
};

}  // namespace byte_pairs
