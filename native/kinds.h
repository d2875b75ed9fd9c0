// How weights are stored: in the checkpoint (blocks) and in our panels.
//
// A panel holds 8 rows of a matrix (8 output columns of the product) in cells of 32 elements of K. Inside a cell the
// bytes are ordered [quad of k][column][k in quad]: one 32-byte register holds four k of all eight columns, so a
// 4-byte broadcast of an activation meets every column at once and output columns live in SIMD lanes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// clang-format off
enum Kind : int {
    F32, F16, BF16,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, IQ4_NL,
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS,
    INT4_32, INT4_128, INT8_32, INT8_128,
    F8_E4M3_32, F8_E5M2_32,
    NF4_32, FP4_32, E2M1_16, IQ1_CODES, IQ2_CODES, IQ3_CODES,
    KIND_COUNT
};
// clang-format on

constexpr int kColumns = 8;       // columns of a panel
constexpr int kCell = 32;         // K elements of a cell
constexpr int kTileColumns = 32;  // output columns of a work item: four panels

// The scales of eight columns. Those named by a float type are at the start of the unit: d of each column, then m of
// each where there is one. The bytes of SUB kinds are at the start of the cell; they multiply float16 d (and m) in the
// head.
enum Scales : int {
    NO_SCALES,
    HALF,        // float16 d
    HALF_MIN,    // float16 d, m
    POWER,       // one byte e: 2^(e - 128)
    FLOAT,       // float32 d
    FLOAT_MIN,   // float32 d, m
    FLOAT_2,     // float32 d of either half of the cell
    SUB8,        // int8 s: d s
    SUB8_2,      // int8 s of either half: d s
    SUB8_MIN,    // uint8 s, t: d s and -m t
    SUB4_MIN_2,  // s + 16 t of either half: d s and -m t
};

// The integers, codes or floats of a cell, after its scales. N4 is 128 bytes: low nibble = quad r, high = quad r + 4;
// B1 is 32: bit q of a byte belongs to quad q; B2 is 64: two bits, four quads per register. Where there are two planes,
// the second holds the higher bits.
enum Planes : int {
    ELEMENTS,       // numbers as they are in the file: [k][column]
    ELEMENT_PAIRS,  // of two bytes: [k / 2][column][2], as words that have the first k in their upper half
    N4,
    N4_B1,
    N4_B2,
    B2,
    B2_B1,
    PAIRS,  // bytes: [k / 2][column][2]
    BYTES,  // bytes: [k][column]
};

// A panel is a run of units; a unit is a head (scales that several cells share) and `unit_cells` cells.
struct KindInfo {
    const char* name;
    int block;        // elements per block in the file
    int block_bytes;  // bytes per block in the file
    int head_bytes;
    int unit_cells;
    int meta_bytes;  // of a cell, before its planes
    Scales scales;
    Planes planes;

    constexpr int plane_bytes() const {
        switch (planes) {
            case ELEMENTS:
            case ELEMENT_PAIRS:
                return kCell * kColumns * block_bytes;
            case N4:
                return 128;
            case N4_B1:
                return 128 + 32;
            case N4_B2:
                return 128 + 64;
            case B2:
                return 64;
            case B2_B1:
                return 64 + 32;
            default:
                return kCell * kColumns;
        }
    }
    constexpr int cell_bytes() const { return meta_bytes + plane_bytes(); }
    constexpr int unit_bytes() const { return head_bytes + unit_cells * cell_bytes(); }
    constexpr int unit() const { return unit_cells * kCell; }  // elements of K
};

constexpr KindInfo kKinds[KIND_COUNT] = {
    {"F32", 1, 4, 0, 1, 0, NO_SCALES, ELEMENTS},
    {"F16", 1, 2, 0, 1, 0, NO_SCALES, ELEMENTS},
    {"BF16", 1, 2, 0, 1, 0, NO_SCALES, ELEMENT_PAIRS},
    {"Q4_0", 32, 18, 0, 1, 16, HALF, N4},
    {"Q4_1", 32, 20, 0, 1, 32, HALF_MIN, N4},
    {"Q5_0", 32, 22, 0, 1, 16, HALF, N4_B1},
    {"Q5_1", 32, 24, 0, 1, 32, HALF_MIN, N4_B1},
    {"Q8_0", 32, 34, 0, 1, 16, HALF, PAIRS},
    {"MXFP4", 32, 17, 0, 1, 8, POWER, N4},
    {"IQ4_NL", 32, 18, 0, 1, 16, HALF, N4},
    {"Q2_K", 256, 84, 32, 8, 16, SUB4_MIN_2, B2},
    {"Q3_K", 256, 110, 16, 8, 16, SUB8_2, B2_B1},
    {"Q4_K", 256, 144, 32, 8, 16, SUB8_MIN, N4},
    {"Q5_K", 256, 176, 32, 8, 16, SUB8_MIN, N4_B1},
    {"Q6_K", 256, 210, 16, 8, 16, SUB8_2, N4_B2},
    {"IQ4_XS", 256, 136, 16, 8, 8, SUB8, N4},
    {"INT4_32", 32, 24, 0, 1, 64, FLOAT_MIN, N4},
    {"INT4_128", 128, 72, 64, 4, 0, FLOAT_MIN, N4},
    {"INT8_32", 32, 40, 0, 1, 64, FLOAT_MIN, PAIRS},
    {"INT8_128", 128, 136, 64, 4, 0, FLOAT_MIN, PAIRS},
    {"F8_E4M3_32", 32, 36, 0, 1, 32, FLOAT, BYTES},
    {"F8_E5M2_32", 32, 36, 0, 1, 32, FLOAT, BYTES},
    {"NF4_32", 32, 20, 0, 1, 32, FLOAT, N4},
    {"FP4_32", 32, 20, 0, 1, 32, FLOAT, N4},
    {"E2M1_16", 16, 12, 0, 1, 64, FLOAT_2, N4},
    {"IQ1_CODES", 16, 12, 0, 1, 64, FLOAT_2, N4},
    {"IQ2_CODES", 16, 12, 0, 1, 64, FLOAT_2, N4},
    {"IQ3_CODES", 16, 12, 0, 1, 64, FLOAT_2, N4},
};

constexpr int64_t kNear = 2048;  // bytes ahead within a panel that memory needs to be asked for

// Rows of a matrix in one format, packed.
struct Panels {
    const uint8_t* data;
    int64_t panel_bytes;
    int n_out;
    int n_in;
    int kind;
    int64_t ahead;  // bytes from what a worker reads to what it should ask for

    int64_t bytes() const { return (n_out + kColumns - 1) / kColumns * panel_bytes; }
};

}  // namespace octavo
