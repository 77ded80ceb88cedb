//! The bits of a scan, and Huffman codes.

use super::error;
use crate::error::ImageError;

/// Bits of a code that are looked up at once.
const LOOKUP: u32 = 9;

/// A Huffman code.
pub struct HuffmanTable {
    /// For each first bits the length and the symbol of a code that they start with; 0 if it is longer.
    lookup: Vec<(u8, u8)>,
    /// For each length the first code, the number of codes, and the place of the first symbol.
    lengths: [(u32, u32, usize); 17],
    symbols: Vec<u8>,
}

impl HuffmanTable {
    /// The code with so many symbols of each length; none if there is no such code.
    pub fn new(counts: &[u8; 16], symbols: &[u8]) -> Option<Self> {
        let mut lookup = vec![(0, 0); 1 << LOOKUP];
        let mut lengths = [(0, 0, 0); 17];
        let (mut code, mut place) = (0_u32, 0);
        for (length, &count) in (1_u32..).zip(counts) {
            let count = u32::from(count);
            if code + count > 1 << length {
                return None;
            }
            lengths[length as usize] = (code, count, place);
            for number in 0..count {
                if length <= LOOKUP {
                    let symbol = symbols[place + number as usize];
                    let start = ((code + number) << (LOOKUP - length)) as usize;
                    lookup[start..start + (1 << (LOOKUP - length))].fill((length as u8, symbol));
                }
            }
            place += count as usize;
            code = (code + count) << 1;
        }
        Some(Self {
            lookup,
            lengths,
            symbols: symbols.to_vec(),
        })
    }
}

/// Reads the bits of a scan until the next marker.
pub struct Bits<'a> {
    bytes: &'a [u8],
    at: usize,
    /// The next bits, at the upper end, and how many there are.
    buffer: u64,
    len: u32,
    /// Bits in the buffer that stand after the end of the data.
    num_missing: u32,
}

impl<'a> Bits<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            buffer: 0,
            len: 0,
            num_missing: 0,
        }
    }

    /// Bytes that have been read.
    pub fn position(&self) -> usize {
        self.at
    }

    fn refill(&mut self) {
        while self.len <= 56 {
            let byte = match self.bytes.get(self.at..) {
                Some([0xff, 0, ..]) => {
                    self.at += 2;
                    0xff
                }
                // A marker, or the end of the data.
                Some([0xff, ..] | []) | None => {
                    self.num_missing += 8;
                    0
                }
                Some(&[byte, ..]) => {
                    self.at += 1;
                    byte
                }
            };
            self.buffer |= u64::from(byte) << (56 - self.len);
            self.len += 8;
        }
    }

    fn consume(&mut self, num_bits: u32) -> Result<(), ImageError> {
        self.buffer <<= num_bits;
        self.len -= num_bits;
        match self.len < self.num_missing {
            true => Err(error("the data of a scan ends early")),
            false => Ok(()),
        }
    }

    /// The next bits as a number; at most 16.
    pub fn number(&mut self, num_bits: u32) -> Result<i32, ImageError> {
        if num_bits == 0 {
            return Ok(0);
        }
        if self.len < num_bits {
            self.refill();
        }
        let number = (self.buffer >> (64 - num_bits)) as i32;
        self.consume(num_bits)?;
        Ok(number)
    }

    pub fn bit(&mut self) -> Result<bool, ImageError> {
        Ok(self.number(1)? == 1)
    }

    /// The next bits as a difference, whose first bit is its sign.
    pub fn difference(&mut self, num_bits: u32) -> Result<i32, ImageError> {
        let number = self.number(num_bits)?;
        match num_bits > 0 && number < 1 << (num_bits - 1) {
            true => Ok(number - (1 << num_bits) + 1),
            false => Ok(number),
        }
    }

    /// The symbol of the next code.
    pub fn symbol(&mut self, table: &HuffmanTable) -> Result<u8, ImageError> {
        if self.len < 16 {
            self.refill();
        }
        let (length, symbol) = table.lookup[(self.buffer >> (64 - LOOKUP)) as usize];
        if length > 0 {
            self.consume(u32::from(length))?;
            return Ok(symbol);
        }
        for length in LOOKUP + 1..=16 {
            let code = (self.buffer >> (64 - length)) as u32;
            let (first, count, place) = table.lengths[length as usize];
            if code.wrapping_sub(first) < count {
                self.consume(length)?;
                return Ok(table.symbols[place + (code - first) as usize]);
            }
        }
        Err(error("a Huffman code is unknown"))
    }

    /// Goes on after the marker of a restart, which has to follow.
    pub fn restart(&mut self) -> Result<(), ImageError> {
        (self.buffer, self.len, self.num_missing) = (0, 0, 0);
        let rest = self.bytes.get(self.at..).unwrap_or(&[]);
        let fill = rest.iter().take_while(|byte| **byte == 0xff).count();
        match (fill, rest.get(fill)) {
            (1.., Some(0xd0..=0xd7)) => {
                self.at += fill + 1;
                Ok(())
            }
            _ => Err(error("a restart is missing")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_room_for_their_symbols() {
        let counts = |lengths: &[(usize, u8)]| {
            let mut counts = [0; 16];
            lengths
                .iter()
                .for_each(|&(length, count)| counts[length - 1] = count);
            counts
        };
        assert!(HuffmanTable::new(&counts(&[(1, 1), (2, 2)]), &[1, 2, 3]).is_some());
        assert!(HuffmanTable::new(&counts(&[(1, 3)]), &[1, 2, 3]).is_none());
        assert!(HuffmanTable::new(&counts(&[(1, 2), (2, 1)]), &[1, 2, 3]).is_none());
    }

    #[test]
    fn codes_of_each_length_are_read_until_the_data_ends() {
        // 0, 10, 110 ... with 1 to 15 bits.
        let mut counts = [1; 16];
        counts[15] = 0;
        let symbols: Vec<u8> = (1..=15).collect();
        let table = HuffmanTable::new(&counts, &symbols).expect("a code");
        // 0; 10; fourteen ones and a zero; the zero byte after 0xff is no data.
        let mut bits = Bits::new(&[0b0101_1111, 0xff, 0, 0b1000_0000]);
        assert_eq!(bits.symbol(&table).ok(), Some(1));
        assert_eq!(bits.symbol(&table).ok(), Some(2));
        assert_eq!(bits.symbol(&table).ok(), Some(15));
        assert_eq!(bits.number(6).ok(), Some(0));
        assert!(bits.bit().is_err(), "the data has ended");
    }
}
