//! The inverse cosine transform in whole numbers, as libjpeg computes it (`jidctint.c`): Loeffler, Ligtenberg and
//! Moschytz's with 11 multiplications, factors with 13 binary places, and 2 more places between the passes.

use std::num::Wrapping;

/// The side of a block.
pub const SIDE: usize = 8;

/// The place in a block of each coefficient of the diagonal scan.
const DIAGONAL: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20,
    13, 6, 7, 14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59,
    52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
];

const PLACES: usize = 13;
const PLACES_BETWEEN: usize = 2;

/// The samples of a block.
pub fn inverse(coefficients: &[i16; 64], table: &[u16; 64]) -> [[u8; SIDE]; SIDE] {
    let mut block = [[Wrapping(0_i32); SIDE]; SIDE];
    for ((&coefficient, &factor), place) in coefficients.iter().zip(table).zip(DIAGONAL) {
        let place = usize::from(place);
        let value = Wrapping(i32::from(coefficient)) * Wrapping(i32::from(factor));
        block[place / SIDE][place % SIDE] = value;
    }
    for column in 0..SIDE {
        let values = std::array::from_fn(|row| block[row][column]);
        let values = pass(values, PLACES - PLACES_BETWEEN);
        for (row, value) in block.iter_mut().zip(values) {
            row[column] = value;
        }
    }
    block.map(|row| {
        let row = pass(row, PLACES + PLACES_BETWEEN + 3);
        row.map(|value| (value + Wrapping(128)).0.clamp(0, 255) as u8)
    })
}

/// The transform of eight values, rounded to so many places fewer.
fn pass(values: [Wrapping<i32>; SIDE], num_places: usize) -> [Wrapping<i32>; SIDE] {
    const fn factor(value: i32) -> Wrapping<i32> {
        Wrapping(value)
    }
    // The even values.
    let [x0, x1, x2, x3, x4, x5, x6, x7] = values;
    let turned = (x2 + x6) * factor(4433);
    let even_2 = turned - x6 * factor(15_137);
    let even_3 = turned + x2 * factor(6270);
    let even_0 = (x0 + x4) << PLACES;
    let even_1 = (x0 - x4) << PLACES;
    let even = [
        even_0 + even_3,
        even_1 + even_2,
        even_1 - even_2,
        even_0 - even_3,
    ];
    // The odd ones.
    let (sum_71, sum_53, sum_73, sum_51) = (x7 + x1, x5 + x3, x7 + x3, x5 + x1);
    let all = (sum_73 + sum_51) * factor(9633);
    let sum_71 = sum_71 * factor(-7373);
    let sum_53 = sum_53 * factor(-20_995);
    let sum_73 = sum_73 * factor(-16_069) + all;
    let sum_51 = sum_51 * factor(-3196) + all;
    let odd = [
        x1 * factor(12_299) + sum_71 + sum_51,
        x3 * factor(25_172) + sum_53 + sum_73,
        x5 * factor(16_819) + sum_53 + sum_51,
        x7 * factor(2446) + sum_71 + sum_73,
    ];
    let half = Wrapping(1 << (num_places - 1));
    std::array::from_fn(|place| {
        let sum = match place < 4 {
            true => even[place] + odd[place],
            false => even[7 - place] - odd[7 - place],
        };
        (sum + half) >> num_places
    })
}
