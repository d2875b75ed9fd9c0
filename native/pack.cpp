#include "pack.h"

#include <algorithm>
#include <cstring>

namespace octavo {

namespace {

// One block, taken apart: 16 to 256 elements. d and m point into the file.
struct Block {
    uint8_t q[256];
    uint8_t scale[16];
    uint8_t minimum[8];
    const uint8_t* d;
    const uint8_t* m;
};

// `bytes` bytes: all low halves, then all high halves.
void split_nibbles(const uint8_t* packed, int bytes, uint8_t* q) {
    for (int i = 0; i < bytes; ++i) {
        q[i] = packed[i] & 15;
        q[i + bytes] = packed[i] >> 4;
    }
}

void add_fifth_bits(const uint8_t* bits, uint8_t* q) {
    for (int i = 0; i < 32; i += 4) {
        uint32_t four;
        std::memcpy(&four, q + i, 4);
        // Bit j of the factor's four copies meets byte j.
        four |= ((bits[i / 8] >> (i % 8) & 15u) * 0x00204081u & 0x01010101u) << 4;
        std::memcpy(q + i, &four, 4);
    }
}

// The 6-bit scales and minima of Q4_K and Q5_K, 12 bytes for eight groups.
void split_scales(const uint8_t* s, Block& out) {
    for (int i = 0; i < 4; ++i) {
        out.scale[i] = s[i] & 63;
        out.minimum[i] = s[i + 4] & 63;
        out.scale[i + 4] = (s[i + 8] & 15) | (s[i] >> 6 << 4);
        out.minimum[i + 4] = (s[i + 8] >> 4) | (s[i + 4] >> 6 << 4);
    }
}

void read_q2_block(const uint8_t* p, Block& out) {
    std::memcpy(out.scale, p, 16);
    for (int run = 0; run < 8; ++run) {
        const uint8_t* low = p + 16 + run / 4 * 32;
        for (int k = 0; k < 32; ++k) out.q[run * 32 + k] = low[k] >> (run % 4 * 2) & 3;
    }
    out.d = p + 80;
    out.m = p + 82;
}

void read_q3_block(const uint8_t* p, Block& out) {
    for (int run = 0; run < 8; ++run) {
        const uint8_t* low = p + 32 + run / 4 * 32;
        for (int k = 0; k < 32; ++k) {
            out.q[run * 32 + k] = (low[k] >> (run % 4 * 2) & 3) | (p[k] >> run & 1) << 2;
        }
    }
    const uint8_t* s = p + 96;
    for (int i = 0; i < 16; ++i) {
        const int low = s[i % 8] >> (i / 8 * 4) & 15;
        out.scale[i] = static_cast<uint8_t>((low | (s[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32);
    }
    out.d = p + 108;
}

void read_q4_or_q5_block(const uint8_t* p, bool five_bits, Block& out) {
    out.m = p + 2;
    split_scales(p + 4, out);
    const uint8_t* high = p + 16;
    const uint8_t* low = five_bits ? p + 48 : p + 16;
    for (int pair = 0; pair < 4; ++pair) {
        split_nibbles(low + pair * 32, 32, out.q + pair * 64);
        for (int i = 0; five_bits && i < 32; ++i) {
            out.q[pair * 64 + i] |= (high[i] >> (2 * pair) & 1) << 4;
            out.q[pair * 64 + 32 + i] |= (high[i] >> (2 * pair + 1) & 1) << 4;
        }
    }
}

void read_q6_block(const uint8_t* p, Block& out) {
    for (int half = 0; half < 2; ++half) {
        const uint8_t* low = p + half * 64;
        const uint8_t* high = p + 128 + half * 32;
        uint8_t* q = out.q + half * 128;
        split_nibbles(low, 64, q);
        for (int run = 0; run < 4; ++run) {
            for (int k = 0; k < 32; ++k) q[run * 32 + k] |= (high[k] >> (run * 2) & 3) << 4;
        }
    }
    std::memcpy(out.scale, p + 192, 16);
    out.d = p + 208;
}

void read_iq4_xs_block(const uint8_t* p, Block& out) {
    for (int group = 0; group < 8; ++group) {
        const int low = p[4 + group / 2] >> (group % 2 * 4) & 15;
        const int high = p[2 + group / 4] >> (group % 4 * 2) & 3;
        out.scale[group] = static_cast<uint8_t>((low | high << 4) - 32);
        split_nibbles(p + 8 + group * 16, 16, out.q + group * 32);
    }
}

void read_block(int kind, const uint8_t* p, Block& out) {
    out.d = p;
    switch (kind) {
        case Q4_0:
        case IQ4_NL:
            split_nibbles(p + 2, 16, out.q);
            break;
        case Q4_1:
            out.m = p + 2;
            split_nibbles(p + 4, 16, out.q);
            break;
        case Q5_0:
            split_nibbles(p + 6, 16, out.q);
            add_fifth_bits(p + 2, out.q);
            break;
        case Q5_1:
            out.m = p + 2;
            split_nibbles(p + 8, 16, out.q);
            add_fifth_bits(p + 4, out.q);
            break;
        case Q8_0:
            std::memcpy(out.q, p + 2, 32);
            break;
        case MXFP4:
            split_nibbles(p + 1, 16, out.q);
            break;
        case Q2_K:
            read_q2_block(p, out);
            break;
        case Q3_K:
            read_q3_block(p, out);
            break;
        case Q4_K:
        case Q5_K:
            read_q4_or_q5_block(p, kind == Q5_K, out);
            break;
        case Q6_K:
            read_q6_block(p, out);
            break;
        case IQ4_XS:
            read_iq4_xs_block(p, out);
            break;
        case INT4_32:
        case INT4_128:
            out.m = p + 4;
            for (int k = 0; k < kKinds[kind].block; k += 32) split_nibbles(p + 8 + k / 2, 16, out.q + k);
            break;
        case INT8_32:
        case INT8_128:
            out.m = p + 4;
            std::memcpy(out.q, p + 8, kKinds[kind].block);
            break;
        case F8_E4M3_32:
        case F8_E5M2_32:
            std::memcpy(out.q, p + 4, 32);
            break;
        default:  // codes into a table
            split_nibbles(p + 4, kKinds[kind].block / 2, out.q);
    }
}

// The scales of a block whose elements begin at `first` of their unit.
void put_scales(const KindInfo& info, const Block& block, int column, int first, uint8_t* unit) {
    const int cell_bytes = info.cell_bytes();
    uint8_t* cell = unit + info.head_bytes;
    switch (info.scales) {
        case POWER:
            unit[column] = *block.d;
            return;
        case FLOAT_MIN:
            std::memcpy(unit + 32 + 4 * column, block.m, 4);
            [[fallthrough]];
        case FLOAT:
            std::memcpy(unit + 4 * column, block.d, 4);
            return;
        case FLOAT_2:
            std::memcpy(unit + first / 16 * 32 + 4 * column, block.d, 4);
            return;
        case SUB8:
            for (int c = 0; c < info.unit_cells; ++c) cell[c * cell_bytes + column] = block.scale[c];
            break;
        case SUB8_2:
        case SUB4_MIN_2:
            for (int i = 0; i < 2 * info.unit_cells; ++i) {
                cell[i / 2 * cell_bytes + i % 2 * 8 + column] = block.scale[i];
            }
            break;
        case SUB8_MIN:
            for (int c = 0; c < info.unit_cells; ++c) {
                cell[c * cell_bytes + column] = block.scale[c];
                cell[c * cell_bytes + 8 + column] = block.minimum[c];
            }
            break;
        default:
            break;
    }
    std::memcpy(unit + 2 * column, block.d, 2);
    const bool minimum = info.scales == HALF_MIN || info.scales == SUB8_MIN || info.scales == SUB4_MIN_2;
    if (minimum) std::memcpy(unit + 16 + 2 * column, block.m, 2);
}

// Elements [first, first + count) of a cell: of one column, from q. The target is zero before. The four k of a quad are
// neighbours on both sides, so they move as one word.
template <Planes kind>
void put_planes(const uint8_t* q, int first, int count, int column, uint8_t* planes) {
    if constexpr (kind == BYTES) {
        for (int k = first; k < first + count; ++k) planes[k * 8 + column] = *q++;
    } else if constexpr (kind == PAIRS) {
        for (int k = first; k < first + count; k += 2, q += 2) std::memcpy(planes + k * 8 + column * 2, q, 2);
    } else {
        constexpr bool nibbles = kind == N4 || kind == N4_B1 || kind == N4_B2;
        constexpr int below_twos = nibbles ? 4 : 0;  // lower bits, of another plane
        constexpr int below_ones = kind == N4_B1 ? 4 : 2;
        const auto add = [&](int word, uint32_t bits) {
            uint8_t* at = planes + (word * 8 + column) * 4;
            uint32_t there;
            std::memcpy(&there, at, 4);
            there |= bits;
            std::memcpy(at, &there, 4);
        };
        for (int quad = first / 4; quad < (first + count) / 4; ++quad, q += 4) {
            uint32_t values;
            std::memcpy(&values, q, 4);
            if constexpr (nibbles) add(quad % 4, (values & 0x0f0f0f0f) << (quad < 4 ? 0 : 4));
            if constexpr (kind == N4_B2 || kind == B2 || kind == B2_B1) {
                add((nibbles ? 4 : 0) + quad / 4, (values >> below_twos & 0x03030303) << (quad % 4 * 2));
            }
            if constexpr (kind == N4_B1 || kind == B2_B1) {
                add(kind == N4_B1 ? 4 : 2, (values >> below_ones & 0x01010101) << quad);
            }
        }
    }
}

// Float kinds: [k][column], rows of the file strided; with PAIRED, [k / 2][column][2], the second of two k first.
template <class Bits, bool PAIRED>
void pack_plain(const Panels& part, const StoredRows& rows, int panel, uint8_t* out) {
    for (int column = 0; column < kColumns; ++column) {
        const int row = panel * kColumns + column;
        if (row >= rows.n_out) break;
        const uint8_t* source = rows.data + row * rows.row_stride;
        for (int k = 0; k < part.n_in; ++k) {
            const int64_t at =
                PAIRED ? int64_t{k / 2 * kColumns + column} * 2 + 1 - k % 2 : int64_t{k} * kColumns + column;
            std::memcpy(out + at * sizeof(Bits), source + int64_t{k} * sizeof(Bits), sizeof(Bits));
        }
    }
}

template <Planes kind>
void pack_blocks(const Panels& part, const StoredRows& rows, int panel, uint8_t* out) {
    const KindInfo& info = kKinds[part.kind];
    Block block;
    for (int column = 0; column < kColumns; ++column) {
        const int row = panel * kColumns + column;
        if (row >= rows.n_out) break;
        const uint8_t* source = rows.data + row * rows.row_stride;
        for (int begin = 0; begin < part.n_in; begin += info.block, source += info.block_bytes) {
            read_block(part.kind, source, block);
            uint8_t* unit = out + int64_t{begin / info.unit()} * info.unit_bytes();
            const int first = begin % info.unit();
            put_scales(info, block, column, first, unit);
            for (int k = 0; k < info.block; k += kCell) {
                uint8_t* cell = unit + info.head_bytes + (first + k) / kCell * info.cell_bytes();
                put_planes<kind>(block.q + k, first % kCell, info.block < kCell ? info.block : kCell, column,
                                 cell + info.meta_bytes);
            }
        }
    }
}

using Pack = void (*)(const Panels& part, const StoredRows& rows, int panel, uint8_t* out);

Pack packer(const KindInfo& info) {
    switch (info.planes) {
        case ELEMENTS:
            return info.block_bytes == 4 ? pack_plain<uint32_t, false> : pack_plain<uint16_t, false>;
        case ELEMENT_PAIRS:
            return pack_plain<uint16_t, true>;
        case N4:
            return pack_blocks<N4>;
        case N4_B1:
            return pack_blocks<N4_B1>;
        case N4_B2:
            return pack_blocks<N4_B2>;
        case B2:
            return pack_blocks<B2>;
        case B2_B1:
            return pack_blocks<B2_B1>;
        case PAIRS:
            return pack_blocks<PAIRS>;
        default:
            return pack_blocks<BYTES>;
    }
}

// How far ahead of what it reads a worker asks for weights. As tiles are handed out in order, the one that is as many
// away as there are workers is likely to be its next; of large tiles, two of which need not fit into a second-level
// cache, it asks for what follows in the panel.
int64_t ahead(int64_t panel_bytes, int workers) {
    constexpr int64_t kLarge = 128 << 10;
    const int64_t tile = kTileColumns / kColumns * panel_bytes;
    return tile <= kLarge ? tile * workers : kNear;
}

}  // namespace

std::shared_ptr<Weight> make_weight(const Pool& pool, Store& store, const std::vector<PartShape>& parts, int n_in) {
    auto weight = std::make_shared<Weight>();
    weight->n_in = n_in;
    std::vector<int64_t> bytes(pool.nodes());  // of each node
    std::vector<int64_t> offsets;
    for (size_t source = 0; source < parts.size(); ++source) {
        const PartShape& part = parts[source];
        const KindInfo& info = kKinds[part.kind];
        const int64_t panel_bytes = int64_t{(n_in + info.unit() - 1) / info.unit()} * info.unit_bytes();
        const int tiles = (part.n_out + kTileColumns - 1) / kTileColumns;
        for (int node = 0; node < pool.nodes(); ++node) {
            const int from = pool.first_owned(node, tiles) * kTileColumns;
            const int n_out = std::min(pool.first_owned(node + 1, tiles) * kTileColumns, part.n_out) - from;
            if (n_out <= 0) continue;
            offsets.push_back(bytes[node]);
            weight->parts.push_back(
                {nullptr, panel_bytes, n_out, n_in, part.kind, ahead(panel_bytes, pool.workers(node))});
            weight->first.push_back(weight->n_out);
            weight->node.push_back(node);
            weight->source.push_back(static_cast<int>(source));
            weight->n_out += n_out;
            bytes[node] += (weight->parts.back().bytes() + 63) / 64 * 64;
        }
    }
    for (int node = 0; node < pool.nodes(); ++node) {
        weight->bytes += bytes[node];
        weight->data.push_back(store.take(bytes[node], node));
    }
    for (size_t i = 0; i < weight->parts.size(); ++i) {
        weight->parts[i].data = weight->data[weight->node[i]].get() + offsets[i];
    }
    return weight;
}

void touch_pages(Pool& pool, const Weight& weight, int source) {
    if (pool.nodes() == 1) return;
    constexpr int64_t kPage = 4096;
    struct Piece {
        uint8_t* data;
        int64_t bytes;
    };
    std::vector<Piece> pieces;  // of which each node has as many as it has workers, so that all take part
    std::vector<int> starts = {0};
    for (int node = 0; node < pool.nodes(); ++node) {
        for (size_t part = 0; part < weight.parts.size(); ++part) {
            if (weight.source[part] != source || weight.node[part] != node) continue;
            const int64_t bytes = weight.parts[part].bytes();
            const int64_t step = bytes / pool.workers(node) + 1;
            uint8_t* memory = weight.data[node].get();
            uint8_t* data = memory + (weight.parts[part].data - memory);
            for (int64_t at = 0; at < bytes; at += step) pieces.push_back({data + at, std::min(step, bytes - at)});
        }
        starts.push_back(static_cast<int>(pieces.size()));
    }
    pool.run([&](int worker) {
        pool.each_local(starts, worker, [&](int n, int) {
            for (int64_t at = 0; at < pieces[n].bytes; at += kPage) {
                static_cast<volatile uint8_t*>(pieces[n].data)[at] = 0;
            }
        });
    });
}

void pack_rows(Pool& pool, const Weight& weight, int source, int first_row, const StoredRows& rows, int32_t* packers) {
    const auto of_source = std::equal_range(weight.source.begin(), weight.source.end(), source);
    const size_t begin = of_source.first - weight.source.begin();
    const size_t end = of_source.second - weight.source.begin();
    const Pack pack = packer(kKinds[weight.parts[begin].kind]);
    const int panels = (rows.n_out + kColumns - 1) / kColumns;
    const auto first_panel = [&](size_t part) {  // among those of `rows`; nodes own them in ascending order
        return (weight.first[part] - weight.first[begin] - first_row) / kColumns;
    };
    std::vector<int> starts(pool.nodes() + 1, panels);
    for (size_t part = end; part-- > begin;) {
        const int node = std::min(weight.node[part], pool.nodes() - 1);
        std::fill(starts.begin(), starts.begin() + node + 1, std::clamp(first_panel(part), 0, panels));
    }
    pool.run([&](int worker) {
        pool.each_local(starts, worker, [&](int panel, int) {
            size_t part = begin;
            while (part + 1 < end && first_panel(part + 1) <= panel) ++part;
            const Panels& own = weight.parts[part];
            uint8_t* memory = weight.data[weight.node[part]].get();
            pack(own, rows, panel, memory + (own.data - memory) + (panel - first_panel(part)) * own.panel_bytes);
            if (packers != nullptr) packers[panel] = worker;
        });
    });
}

}  // namespace octavo
