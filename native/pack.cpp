#include "pack.h"

#include <cstring>

namespace octavo {

namespace {

// One block of a ggml format, taken apart: 32 or 256 elements.
struct Block {
    uint8_t q[256];
    uint8_t scale[16];
    uint8_t minimum[8];
    uint16_t d;
    uint16_t m;
};

uint16_t half_at(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}

void split_nibbles(const uint8_t* packed, uint8_t* q) {
    for (int i = 0; i < 16; ++i) {
        q[i] = packed[i] & 15;
        q[i + 16] = packed[i] >> 4;
    }
}

void add_fifth_bits(const uint8_t* bits, uint8_t* q) {
    uint32_t high;
    std::memcpy(&high, bits, 4);
    for (int i = 0; i < 32; ++i) q[i] |= (high >> i & 1) << 4;
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

void read_k_block(const uint8_t* p, bool five_bits, Block& out) {
    out.d = half_at(p);
    out.m = half_at(p + 2);
    split_scales(p + 4, out);
    const uint8_t* high = p + 16;
    const uint8_t* low = five_bits ? p + 48 : p + 16;
    for (int pair = 0; pair < 4; ++pair) {
        for (int i = 0; i < 32; ++i) {
            uint8_t first = low[pair * 32 + i] & 15;
            uint8_t second = low[pair * 32 + i] >> 4;
            if (five_bits) {
                first |= (high[i] >> (2 * pair) & 1) << 4;
                second |= (high[i] >> (2 * pair + 1) & 1) << 4;
            }
            out.q[pair * 64 + i] = first;
            out.q[pair * 64 + 32 + i] = second;
        }
    }
}

void read_q6_block(const uint8_t* p, Block& out) {
    for (int half = 0; half < 2; ++half) {
        const uint8_t* low = p + half * 64;
        const uint8_t* high = p + 128 + half * 32;
        uint8_t* q = out.q + half * 128;
        for (int i = 0; i < 32; ++i) {
            q[i] = (low[i] & 15) | (high[i] & 3) << 4;
            q[i + 32] = (low[i + 32] & 15) | (high[i] >> 2 & 3) << 4;
            q[i + 64] = (low[i] >> 4) | (high[i] >> 4 & 3) << 4;
            q[i + 96] = (low[i + 32] >> 4) | (high[i] >> 6 & 3) << 4;
        }
    }
    std::memcpy(out.scale, p + 192, 16);
    out.d = half_at(p + 208);
}

void read_block(int kind, const uint8_t* p, Block& out) {
    out.d = half_at(p);
    switch (kind) {
        case Q4_0:
            split_nibbles(p + 2, out.q);
            break;
        case Q4_1:
            out.m = half_at(p + 2);
            split_nibbles(p + 4, out.q);
            break;
        case Q5_0:
            split_nibbles(p + 6, out.q);
            add_fifth_bits(p + 2, out.q);
            break;
        case Q5_1:
            out.m = half_at(p + 2);
            split_nibbles(p + 8, out.q);
            add_fifth_bits(p + 4, out.q);
            break;
        case Q8_0:
            std::memcpy(out.q, p + 2, 32);
            break;
        case MXFP4:
            out.d = p[0];
            split_nibbles(p + 1, out.q);
            break;
        case Q4_K:
        case Q5_K:
            read_k_block(p, kind == Q5_K, out);
            break;
        default:
            read_q6_block(p, out);
    }
}

void put_half(uint8_t* plane, int column, uint16_t value) { std::memcpy(plane + 2 * column, &value, 2); }

// The planes N4, B1, B2 of one column: q holds 32 values. The target is zero before.
void put_quads(const uint8_t* q, int kind, int column, uint8_t* planes) {
    uint8_t* extra = planes + 128;
    const bool one_bit = kind == Q5_0 || kind == Q5_1 || kind == Q5_K;
    for (int k = 0; k < kCell; ++k) {
        const int quad = k / 4;
        const int byte = column * 4 + k % 4;
        planes[quad % 4 * 32 + byte] |= (q[k] & 15) << (quad < 4 ? 0 : 4);
        if (one_bit) extra[byte] |= (q[k] >> 4 & 1) << quad;
        if (kind == Q6_K) extra[quad / 4 * 32 + byte] |= (q[k] >> 4 & 3) << (quad % 4 * 2);
    }
}

void put_block(int kind, const Block& block, int column, uint8_t* unit) {
    const KindInfo& info = kKinds[kind];
    if (info.unit_cells > 1) {
        put_half(unit, column, block.d);
        if (kind != Q6_K) put_half(unit + 16, column, block.m);
        for (int c = 0; c < info.unit_cells; ++c) {
            uint8_t* cell = unit + info.head_bytes + c * info.cell_bytes;
            cell[column] = kind == Q6_K ? block.scale[2 * c] : block.scale[c];
            cell[8 + column] = kind == Q6_K ? block.scale[2 * c + 1] : block.minimum[c];
            put_quads(block.q + c * kCell, kind, column, cell + 16);
        }
        return;
    }
    if (kind == MXFP4) {
        unit[column] = static_cast<uint8_t>(block.d);
        put_quads(block.q, kind, column, unit + 8);
        return;
    }
    put_half(unit, column, block.d);
    if (kind == Q8_0) {
        for (int k = 0; k < kCell; ++k) unit[16 + k / 2 * 16 + column * 2 + k % 2] = block.q[k];
        return;
    }
    const bool minimum = kind == Q4_1 || kind == Q5_1;
    if (minimum) put_half(unit + 16, column, block.m);
    put_quads(block.q, kind, column, unit + (minimum ? 32 : 16));
}

// Float kinds: [k][column], rows of the file strided.
void pack_plain(const StoredPart& part, int panel, uint8_t* out) {
    const int size = kKinds[part.kind].block_bytes;
    for (int column = 0; column < kColumns; ++column) {
        const int row = panel * kColumns + column;
        if (row >= part.n_out) break;
        const uint8_t* source = part.data + row * part.row_stride;
        for (int k = 0; k < part.n_in; ++k) {
            std::memcpy(out + (int64_t{k} * kColumns + column) * size, source + int64_t{k} * size, size);
        }
    }
}

void pack_blocks(const StoredPart& part, int panel, uint8_t* out) {
    const KindInfo& info = kKinds[part.kind];
    const int64_t unit_bytes = info.head_bytes + info.unit_cells * info.cell_bytes;
    Block block;
    for (int column = 0; column < kColumns; ++column) {
        const int row = panel * kColumns + column;
        if (row >= part.n_out) break;
        const uint8_t* source = part.data + row * part.row_stride;
        for (int unit = 0; unit < part.n_in / info.block; ++unit) {
            read_block(part.kind, source + int64_t{unit} * info.block_bytes, block);
            put_block(part.kind, block, column, out + unit * unit_bytes);
        }
    }
}

}  // namespace

std::shared_ptr<Weight> pack_weight(Pool& pool, Store& store, const std::vector<StoredPart>& parts) {
    auto weight = std::make_shared<Weight>();
    weight->n_in = parts.front().n_in;
    size_t total = 0;
    std::vector<size_t> offsets;
    for (const StoredPart& part : parts) {
        const KindInfo& info = kKinds[part.kind];
        const int cells = (part.n_in + kCell - 1) / kCell;
        const int64_t unit_bytes = info.head_bytes + info.unit_cells * info.cell_bytes;
        const int64_t panel_bytes = cells / info.unit_cells * unit_bytes;
        const int64_t panels = (part.n_out + kColumns - 1) / kColumns;
        offsets.push_back(total);
        weight->parts.push_back({nullptr, panel_bytes, part.n_out, part.n_in, part.kind});
        weight->first.push_back(weight->n_out);
        weight->n_out += part.n_out;
        total += (panels * panel_bytes + 63) / 64 * 64;
    }
    weight->bytes = total;
    weight->data = store.take(total);
    for (size_t i = 0; i < parts.size(); ++i) weight->parts[i].data = weight->data.get() + offsets[i];
    pool.run([&](int worker) {
        for (size_t i = 0; i < parts.size(); ++i) {
            const StoredPart& part = parts[i];
            pool.each((part.n_out + kColumns - 1) / kColumns, worker, [&](int panel, int) {
                uint8_t* out = weight->data.get() + offsets[i] + panel * weight->parts[i].panel_bytes;
                (kKinds[part.kind].block == 1 ? pack_plain : pack_blocks)(part, panel, out);
            });
        }
    });
    return weight;
}

}  // namespace octavo
