// Matrices of bfloat16 into twelve bits a weight, see coded.h.

#pragma once

#include "finish.h"
#include "small.h"
#include "team.h"

#if defined(__AVX512BF16__)

#include <algorithm>
#include <atomic>
#include <vector>

namespace {

class Coding {
    static constexpr int SAMPLED_STEPS = 8;   // of each column: which exponents a panel has is asked of some of its weights
    static constexpr int NUM_SHARED = 15;     // exponents that have codes

    const bf16* const weight_;  // [columns, size]
    const Matrix& matrix_;
    const int64_t most_;
    std::vector<std::vector<Exception>> found_;  // of each panel
    std::atomic<int64_t> count_{0};

  public:
    Coding(const bf16* weight, const Matrix& matrix, int64_t most)
        : weight_(weight), matrix_(matrix), most_(most), found_(matrix.num_panels()) {}

    // How many exceptions there are; more than ``most``: the matrix is not worth it, and panels are not complete.
    int64_t run(uint8_t* panels, int threads) {
        Team::run(threads, [&](Team& team) {
            team.each(matrix_.num_panels(), 1, [&](int64_t panel) {
                if (count_ > most_) return;
                put(panel, panels + panel * Coded::panel_bytes(matrix_.size));
                count_ += found_[panel].size();
            });
        });
        return count_;
    }

    // Them all, and [panels + 1] where each panel's begin.
    void list(Exception* exceptions, int64_t* firsts) const {
        int64_t count = 0;
        for (size_t panel = 0; panel < found_.size(); ++panel) {
            firsts[panel] = count;
            for (const Exception& each : found_[panel]) exceptions[count++] = each;
        }
        firsts[found_.size()] = count;
    }

  private:
    // A panel's column, or null where it has none.
    const bf16* column(int64_t panel, int64_t half, int64_t place) const {
        const int64_t column = matrix_.left(panel) + half * matrix_.apart + place;
        return column < matrix_.columns ? weight_ + column * matrix_.size : nullptr;
    }

    static int exponent_of(bf16 weight) { return weight.bits >> 7 & 255; }

    // The first of the exponents that have codes. Of several as good the least: small weights are more often too small than large
    // ones too large.
    int first_shared(int64_t panel) const {
        int64_t counts[256] = {};
        const int64_t steps = matrix_.size / DEPTH, sampled = std::min<int64_t>(steps, SAMPLED_STEPS);
        for (int64_t place = 0; place < PANEL; ++place) {
            const bf16* from = column(panel, place / TILE, place % TILE);
            for (int64_t sample = 0; from && sample < sampled; ++sample) {
                const bf16* at = from + sample * steps / sampled * DEPTH;
                for (int input = 0; input < DEPTH; ++input) ++counts[exponent_of(at[input])];
            }
        }
        int64_t sum = 0, best = 0;
        int found = 1;
        for (int last = 1; last < 256; ++last) {
            sum += counts[last];
            if (last > NUM_SHARED) sum -= counts[last - NUM_SHARED];
            if (last >= NUM_SHARED && sum > best) best = sum, found = last - NUM_SHARED + 1;
        }
        return found;
    }

    void put(int64_t panel, uint8_t* to) {
        const int first = first_shared(panel);
        uint16_t table[2 * TILE];
        for (int index = 0; index < 2 * TILE; ++index) table[index] = index % TILE ? (first + index % TILE - 1) << 7 : 0;
        std::memcpy(to, table, Coded::TABLE_BYTES);
        to += Coded::TABLE_BYTES;
        for (int64_t step = 0; step < matrix_.size / DEPTH; ++step, to += TILE / Coded::PAIRS * Coded::GROUP_BYTES) {
            for (int64_t half = 0; half < 2; ++half) {
                Words lines[TILE] = {};
                for (int64_t place = 0; place < TILE; ++place) {
                    const bf16* from = column(panel, half, place);
                    if (from) std::memcpy(&lines[place], from + step * DEPTH, sizeof lines[place]);
                }
                transpose(lines);
                for (int64_t pair = 0; pair < TILE; pair += Coded::PAIRS) {
                    const int64_t place = step * 2 * TILE_SIZE + half * TILE_SIZE + pair * Coded::LINE;
                    uint8_t* own = to + pair / Coded::PAIRS * Coded::GROUP_BYTES + half * Coded::HALF_BYTES;
                    put_lines(lines + pair, first, place, own, found_[panel]);
                }
            }
        }
        // The two tiles of a group were not met side by side.
        std::sort(found_[panel].begin(), found_[panel].end(), [](const Exception& one, const Exception& other) {
            return Coded::group_of(one.place) < Coded::group_of(other.place);
        });
    }

    // What one tile has of a group.
    static void put_lines(const Words* lines, int first, int64_t place, uint8_t* to, std::vector<Exception>& found) {
        __m512i codes = _mm512_setzero_si512(), rests[2] = {codes, codes};
        for (int line = 0; line < Coded::PAIRS; ++line, place += Coded::LINE) {
            const __m512i weights = (__m512i)lines[line];
            const __m512i exponents = _mm512_and_si512(_mm512_srli_epi16(weights, 7), _mm512_set1_epi16(255));
            const __m512i code = _mm512_sub_epi16(exponents, _mm512_set1_epi16(int16_t(first - 1)));
            const __m512i above = _mm512_sub_epi16(code, _mm512_set1_epi16(1));
            const __mmask32 has_code = _mm512_cmple_epu16_mask(above, _mm512_set1_epi16(NUM_SHARED - 1));
            const __mmask32 is_coded = has_code | _mm512_testn_epi16_mask(exponents, exponents);
            codes = _mm512_or_si512(codes, _mm512_slli_epi16(_mm512_maskz_mov_epi16(has_code, code), 4 * line));
            const __m512i rest = _mm512_and_si512(weights, _mm512_set1_epi16(int16_t(0x807f)));
            const __m512i own = _mm512_maskz_mov_epi16(is_coded, rest);
            rests[line / 2] = _mm512_or_si512(rests[line / 2], line % 2 ? CodedLines::swapped(own) : own);
            alignas(64) uint16_t bits[Coded::LINE];
            if (!~is_coded) continue;
            _mm512_store_si512(bits, weights);
            for (__mmask32 left = ~is_coded; left; left &= left - 1) {
                const int lane = __builtin_ctz(left);
                found.push_back({uint32_t(place + lane), bits[lane], 0});
            }
        }
        _mm512_store_si512(to, codes);
        _mm512_store_si512(to + 64, rests[0]), _mm512_store_si512(to + 128, rests[1]);
    }
};

}  // namespace

#endif
