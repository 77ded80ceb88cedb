//! Reads the coefficients of a scan.

use std::ops::RangeInclusive;

use super::bits::{Bits, HuffmanTable};
use super::error;
use super::frame::Frame;
use super::segments::Tables;
use super::transform::SIDE;
use crate::error::ImageError;

/// A component in a scan.
struct Part<'a> {
    /// Its place in the frame.
    component: usize,
    first: Option<&'a HuffmanTable>,
    others: Option<&'a HuffmanTable>,
    /// The last first coefficient.
    last: i32,
}

/// The coefficients that a scan has, and which of their bits.
#[derive(Clone)]
struct Selection {
    places: RangeInclusive<usize>,
    /// Whether bits of these coefficients have been in a scan before.
    is_refined: bool,
    /// The lowest bit.
    shift: u32,
}

/// Reads a scan into the frame; returns its length in bytes.
pub fn decode(
    frame: &mut Frame,
    tables: &Tables,
    header: &[u8],
    data: &[u8],
) -> Result<usize, ImageError> {
    let (mut parts, selection) = read_header(frame, tables, header)?;
    for part in &parts {
        let component = &mut frame.components[part.component];
        let table = tables.quantisation.get(component.table).copied().flatten();
        component.quantisation = component.quantisation.or(table);
        if component.quantisation.is_none() {
            return Err(error("a quantisation table is missing"));
        }
        for place in selection.places.clone() {
            component.seen |= 1 << place;
        }
    }
    // A single component is read block after block, several in units with blocks of each.
    let single = match &parts[..] {
        [part] => Some(&frame.components[part.component]),
        _ => None,
    };
    let (rows, columns) = match single {
        Some(component) => (
            component.height.div_ceil(SIDE),
            component.width.div_ceil(SIDE),
        ),
        None => (
            frame.height.div_ceil(SIDE * frame.max_down),
            frame.width.div_ceil(SIDE * frame.max_across),
        ),
    };
    let is_single = single.is_some();
    let mut bits = Bits::new(data);
    let mut num_ended = 0;
    for unit in 0..rows * columns {
        if tables.restart_interval > 0 && unit > 0 && unit % tables.restart_interval == 0 {
            bits.restart()?;
            num_ended = 0;
            parts.iter_mut().for_each(|part| part.last = 0);
        }
        let (row, column) = (unit / columns, unit % columns);
        for part in &mut parts {
            let component = &mut frame.components[part.component];
            let (down, across) = match is_single {
                true => (1, 1),
                false => (component.down, component.across),
            };
            for block in 0..down * across {
                let block_row = row * down + block / across;
                let block_column = column * across + block % across;
                let place = block_row * component.block_columns + block_column;
                let block = &mut component.coefficients[place];
                match frame.is_progressive {
                    false => sequential(&mut bits, part, block)?,
                    true => progressive(&mut bits, part, &selection, &mut num_ended, block)?,
                }
            }
        }
    }
    Ok(bits.position())
}

fn read_header<'a>(
    frame: &Frame,
    tables: &'a Tables,
    header: &[u8],
) -> Result<(Vec<Part<'a>>, Selection), ImageError> {
    let damaged = || error("a scan's header is damaged");
    let (&number, rest) = header.split_first().ok_or_else(damaged)?;
    let number = usize::from(number);
    let (Some(chosen), Some(&[start, end, bits])) = (
        rest.get(..2 * number),
        rest.get(2 * number..).and_then(<[u8]>::first_chunk),
    ) else {
        return Err(damaged());
    };
    let mut parts: Vec<Part> = Vec::new();
    for &[id, names] in chosen.as_chunks().0 {
        let component = frame
            .components
            .iter()
            .position(|component| component.id == id);
        let component = component.ok_or_else(damaged)?;
        if parts.iter().any(|part| part.component == component) {
            return Err(damaged());
        }
        let table =
            |class: usize, index: u8| tables.huffman[class].get(usize::from(index))?.as_ref();
        parts.push(Part {
            component,
            first: table(0, names >> 4),
            others: table(1, names & 15),
            last: 0,
        });
    }
    let selection = match frame.is_progressive {
        false => Selection {
            places: 0..=63,
            is_refined: false,
            shift: 0,
        },
        true => Selection {
            places: usize::from(start)..=usize::from(end),
            is_refined: bits >> 4 != 0,
            shift: u32::from(bits & 15),
        },
    };
    // The first coefficients have scans of their own, and the others scans of one component.
    let is_valid = match (start, end) {
        _ if !frame.is_progressive => true,
        (0, 0) => true,
        (1.., ..=63) => start <= end && parts.len() == 1,
        _ => false,
    };
    match is_valid && !parts.is_empty() && selection.shift <= 13 {
        true => Ok((parts, selection)),
        false => Err(damaged()),
    }
}

fn needed(table: Option<&HuffmanTable>) -> Result<&HuffmanTable, ImageError> {
    table.ok_or_else(|| error("a Huffman table is missing"))
}

/// Reads the first coefficient of a block.
fn first(bits: &mut Bits, part: &mut Part) -> Result<i32, ImageError> {
    let num_bits = bits.symbol(needed(part.first)?)?;
    if num_bits > 15 {
        return Err(error("a difference is too large"));
    }
    part.last = part
        .last
        .wrapping_add(bits.difference(u32::from(num_bits))?);
    Ok(part.last)
}

/// Reads a block of a sequential image.
fn sequential(bits: &mut Bits, part: &mut Part, block: &mut [i16; 64]) -> Result<(), ImageError> {
    block[0] = first(bits, part)? as i16;
    let table = needed(part.others)?;
    let mut place = 1;
    while place < 64 {
        let symbol = bits.symbol(table)?;
        let (run, num_bits) = (usize::from(symbol >> 4), u32::from(symbol & 15));
        place += run;
        match num_bits {
            0 if run < 15 => break,
            0 => {}
            _ => set(block, place, bits.difference(num_bits)?)?,
        }
        place += 1;
    }
    Ok(())
}

/// Reads some bits of some coefficients of a block.
fn progressive(
    bits: &mut Bits,
    part: &mut Part,
    selection: &Selection,
    num_ended: &mut u32,
    block: &mut [i16; 64],
) -> Result<(), ImageError> {
    match (*selection.places.start(), selection.is_refined) {
        (0, false) => {
            block[0] = first(bits, part)?.wrapping_shl(selection.shift) as i16;
            Ok(())
        }
        (0, true) => {
            if bits.bit()? {
                block[0] |= 1 << selection.shift;
            }
            Ok(())
        }
        (_, false) => others(bits, needed(part.others)?, selection, num_ended, block),
        (_, true) => refined(bits, needed(part.others)?, selection, num_ended, block),
    }
}

/// Reads the upper bits of coefficients. A run of blocks has no others.
fn others(
    bits: &mut Bits,
    table: &HuffmanTable,
    selection: &Selection,
    num_ended: &mut u32,
    block: &mut [i16; 64],
) -> Result<(), ImageError> {
    if *num_ended > 0 {
        *num_ended -= 1;
        return Ok(());
    }
    let (mut place, end) = selection.places.clone().into_inner();
    while place <= end {
        let symbol = bits.symbol(table)?;
        let (run, num_bits) = (u32::from(symbol >> 4), u32::from(symbol & 15));
        match num_bits {
            0 if run < 15 => {
                *num_ended = (1 << run) + bits.number(run)?.cast_unsigned() - 1;
                break;
            }
            0 => place += 16,
            _ => {
                place += run as usize;
                set(block, place, bits.difference(num_bits)? << selection.shift)?;
                place += 1;
            }
        }
    }
    Ok(())
}

/// Reads another bit of coefficients that are not zero, and new coefficients between them.
fn refined(
    bits: &mut Bits,
    table: &HuffmanTable,
    selection: &Selection,
    num_ended: &mut u32,
    block: &mut [i16; 64],
) -> Result<(), ImageError> {
    let bit = 1_i16 << selection.shift;
    let (mut place, end) = selection.places.clone().into_inner();
    let refine = |bits: &mut Bits, coefficient: &mut i16| -> Result<(), ImageError> {
        if bits.bit()? && *coefficient & bit == 0 {
            let step = if *coefficient > 0 { bit } else { -bit };
            *coefficient = coefficient.wrapping_add(step);
        }
        Ok(())
    };
    while place <= end && *num_ended == 0 {
        let symbol = bits.symbol(table)?;
        let (mut run, num_bits) = (u32::from(symbol >> 4), symbol & 15);
        let value = match num_bits {
            0 if run < 15 => {
                *num_ended = (1 << run) + bits.number(run)?.cast_unsigned();
                break;
            }
            0 => 0,
            1 if bits.bit()? => bit,
            1 => -bit,
            _ => return Err(error("a refinement has several bits")),
        };
        // The run counts zeros; the others in between are refined.
        while place <= end {
            let coefficient = &mut block[place];
            if *coefficient != 0 {
                refine(bits, coefficient)?;
            } else if run == 0 {
                *coefficient = value;
                place += 1;
                break;
            } else {
                run -= 1;
            }
            place += 1;
        }
    }
    if *num_ended > 0 {
        for coefficient in block.iter_mut().take(end + 1).skip(place) {
            if *coefficient != 0 {
                refine(bits, coefficient)?;
            }
        }
        *num_ended -= 1;
    }
    Ok(())
}

fn set(block: &mut [i16; 64], place: usize, value: i32) -> Result<(), ImageError> {
    match block.get_mut(place) {
        Some(coefficient) => {
            *coefficient = value as i16;
            Ok(())
        }
        None => Err(error("a coefficient is outside its block")),
    }
}
