// Matrices of bfloat16 in twelve bits a weight, and nothing lost: what few rows are multiplied with is read from memory, and there
// is a quarter less of it.
//
// Of a weight's sixteen bits eight are its exponent, and nearly all weights of a panel share fifteen of these. So a panel has a
// table of them, weights have four bits to say which, and those few that have another are listed beside, with their bits. Sign and
// fraction stay as they are. (That exponents of trained weights hold under three bits is what DFloat11, Zhang et al. 2025,
// arXiv:2504.11651, found; it has codes of many lengths, which no vector reads.)
//
// A panel is its table and then, for each four pairs of inputs, a group of six lines: of each of its two tiles one of codes, a
// nibble for each of four lines of pairs, and two of signs and fractions, a byte for each of two.

#pragma once

#include "tiles.h"

#if defined(__AVX512BF16__)

#include <algorithm>

namespace {

// A weight whose exponent has no code, which stands as zero where it is.
struct Exception {
    uint32_t place;  // in a panel as it is without codes
    uint16_t bits;
    uint16_t unused;
};

struct Coded {
    static constexpr int PAIRS = 4;          // of inputs, in a group
    static constexpr int INPUTS = 2 * PAIRS;
    static constexpr int LINE = 2 * TILE;    // weights of a line: a pair of inputs of the columns of a tile
    static constexpr int HALF = PAIRS * LINE;             // weights of a tile in a group
    static constexpr int HALF_BYTES = HALF * 3 / 2, GROUP_BYTES = 2 * HALF_BYTES, TABLE_BYTES = 64;

    const uint8_t* panels;  // or null: the matrix has none
    const Exception* exceptions;  // panel by panel, their places ascending by groups
    const int64_t* firsts;        // [panels + 1] of them

    static int64_t groups_of(int64_t size) { return size / INPUTS; }
    static int64_t panel_bytes(int64_t size) { return TABLE_BYTES + groups_of(size) * GROUP_BYTES; }

    const uint8_t* panel_at(int64_t panel, int64_t size) const { return panels + panel * panel_bytes(size); }
    // Where the group of these inputs is.
    const uint8_t* group_at(int64_t panel, int64_t size, int64_t input) const {
        return panel_at(panel, size) + TABLE_BYTES + input / INPUTS * GROUP_BYTES;
    }
    // Where a group begins in its panel as it is without codes; in which group a place is, and there [tile][pair][16][2].
    static int64_t place_of(int64_t group) { return group / PAIRS * 2 * TILE_SIZE + group % PAIRS * HALF; }
    static int64_t group_of(int64_t place) { return place / (2 * TILE_SIZE) * PAIRS + place % TILE_SIZE / HALF; }
    static int64_t place_in_group(int64_t place) { return place / TILE_SIZE % 2 * HALF + place % HALF; }

    // The exponents of a panel, where they are in a weight.
    static __m512i table_of(const uint8_t* panel) { return _mm512_load_si512(panel); }
};

// Those of a panel that are still to come.
class Exceptions {
    const Exception *next_ = nullptr, *last_ = nullptr;

  public:
    Exceptions() = default;  // none
    Exceptions(const Coded& coded, int64_t panel)
        : next_(coded.exceptions + coded.firsts[panel]), last_(coded.exceptions + coded.firsts[panel + 1]) {}

    // The group of the next one, or ``none``.
    int64_t group(int64_t none) const { return next_ < last_ ? Coded::group_of(next_->place) : none; }

    // Those of earlier groups are passed over.
    void skip(int64_t group) {
        next_ = std::partition_point(next_, last_, [&](const Exception& each) { return Coded::group_of(each.place) < group; });
    }

    // use(exception) of all in groups before ``stop``
    template <typename Use>
    void each(int64_t stop, const Use& use) {
        for (; group(stop) < stop; ++next_) use(*next_);
    }
};

// The lines of one tile in a group.
struct CodedLines {
    __m512i codes, low, high;

    explicit CodedLines(const uint8_t* at)
        : codes(_mm512_load_si512(at)), low(_mm512_load_si512(at + 64)), high(_mm512_load_si512(at + 128)) {}

    // One of them without codes; the number is known when this is compiled.
    [[gnu::always_inline]] __m512i line(int number, __m512i table) const {
        // Of the index the fifth bit counts too, which is the next line's: the table holds everything twice.
        const __m512i exponents = _mm512_permutexvar_epi16(number ? _mm512_srli_epi16(codes, 4 * number) : codes, table);
        const __m512i both = number / 2 ? high : low, rest = number % 2 ? swapped(both) : both;
        // exponents | (rest & of a weight all but its exponent)
        return _mm512_ternarylogic_epi32(exponents, rest, _mm512_set1_epi16(int16_t(0x807f)), 0xf8);
    }

    // The bytes of each sixteen bits. (vpshldw does it too, and takes a sixth more of the time of eight rows on Zen 5.)
    static __m512i swapped(__m512i bytes) {
        return _mm512_shuffle_epi8(bytes, _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001));
    }
};

// Inputs [from, to) of a panel, bit by bit what was packed, some groups at a time: panels[steps][2][16 pairs][16][2].
class Decoding {
    const uint8_t* at_ = nullptr;
    bf16* to_ = nullptr;
    __m512i table_;
    int64_t begin_ = 0, group_ = 0, end_ = 0;
    Exceptions exceptions_;

  public:
    // Bytes by which a panel is fetched before it is read, into the first cache and into the second, which waits for more lines.
    static constexpr int NEAR = 1024, FAR = 8192;

    Decoding() = default;  // nothing

    Decoding(const Coded& coded, int64_t panel, int64_t size, int64_t from, int64_t to, bf16* into)
        : at_(coded.group_at(panel, size, from)), to_(into), table_(Coded::table_of(coded.panel_at(panel, size))),
          begin_(Coded::groups_of(from)), group_(begin_), end_(Coded::groups_of(to)), exceptions_(coded, panel) {
        exceptions_.skip(begin_);
    }

    int64_t left() const { return end_ - group_; }

    void some(int64_t count) {
        const int64_t stop = std::min(group_ + count, end_);
        while (group_ < stop) group(to_ + Coded::place_of(group_) - Coded::place_of(begin_));
        exceptions_.each(stop, [&](const Exception& each) { to_[each.place - Coded::place_of(begin_)].bits = each.bits; });
    }

    // The next step, which there is, into ``to`` [2][16 pairs][16][2].
    [[gnu::always_inline]] void step(bf16* to) {
#pragma GCC unroll 4
        for (int pair = 0; pair < TILE; pair += Coded::PAIRS) group(to + pair * Coded::LINE);
        exceptions_.each(group_, [&](const Exception& each) { to[each.place % (2 * TILE_SIZE)].bits = each.bits; });
    }

  private:
    // The next group, but for exceptions.
    [[gnu::always_inline]] void group(bf16* to) {
#pragma GCC unroll 6
        for (int line = 0; line < Coded::GROUP_BYTES; line += 64) {
            __builtin_prefetch(at_ + FAR + line, 0, 2), __builtin_prefetch(at_ + NEAR + line);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const CodedLines lines(at_ + half * Coded::HALF_BYTES);
#pragma GCC unroll 4
            for (int line = 0; line < Coded::PAIRS; ++line) {
                _mm512_store_si512(to + half * TILE_SIZE + line * Coded::LINE, lines.line(line, table_));
            }
        }
        ++group_, at_ += Coded::GROUP_BYTES;
    }
};

}  // namespace

#endif
