//! Colours. The data colours are the palette of Okabe and Ito ("Color universal design", 2008), which people
//! with any kind of colour blindness can tell apart; both themes share them. Shape repeats every meaning of a
//! colour: waiting requests are drawn slimmer than requests that compute.

/// A colour, as `[red, green, blue]`.
pub type Rgb = [u8; 3];

/// Stages of a request in a step and the series of a chart: class and colour.
pub const DATA: &[(&str, Rgb)] = &[
    ("context", SKY),
    ("generation", BLUE),
    ("paused", ORANGE),
    ("kv", GREEN),
    ("series-0", BLUE),
    ("series-1", VERMILLION),
    ("series-2", GREEN),
    ("series-3", PURPLE),
    ("series-4", ORANGE),
    ("series-5", SKY),
];

/// Everything else that is drawn: class, light colour, dark colour.
pub const FRAME: &[(&str, Rgb, Rgb)] = &[
    ("surface", [0xff, 0xff, 0xff], [0x16, 0x19, 0x1d]),
    ("ink", [0x1b, 0x1f, 0x24], [0xe6, 0xe9, 0xed]),
    ("muted", [0x57, 0x5e, 0x66], [0xa3, 0xab, 0xb4]),
    ("grid", [0xe0, 0xe3, 0xe7], [0x33, 0x39, 0x40]),
    ("waiting", [0x9a, 0xa1, 0xa9], [0x76, 0x7e, 0x87]),
];

const ORANGE: Rgb = [0xe6, 0x9f, 0x00];
const SKY: Rgb = [0x56, 0xb4, 0xe9];
const GREEN: Rgb = [0x00, 0x9e, 0x73];
const BLUE: Rgb = [0x00, 0x72, 0xb2];
const VERMILLION: Rgb = [0xd5, 0x5e, 0x00];
const PURPLE: Rgb = [0xcc, 0x79, 0xa7];

/// Number of `series-N` classes.
pub const NUM_SERIES: usize = 6;

/// The style sheet of a picture.
pub fn style() -> String {
    let mut style = String::from(
        "text{font:11px system-ui,sans-serif}\n\
         line{stroke-width:1}polyline{fill:none;stroke-width:1.5}\n\
         .dashed{stroke-dasharray:3 3}.target{fill:transparent}\n\
         .on-context,.on-paused,.on-waiting{fill:#000}.on-generation{fill:#fff}\n",
    );
    for (class, color) in DATA {
        style += &rule(class, *color);
    }
    for (class, light, _) in FRAME {
        style += &rule(class, *light);
    }
    style += "@media (prefers-color-scheme:dark){\n";
    for (class, _, dark) in FRAME {
        style += &rule(class, *dark);
    }
    style += "}\n";
    style
}

/// A colour in CSS notation.
pub fn hex([red, green, blue]: Rgb) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn rule(class: &str, color: Rgb) -> String {
    let color = hex(color);
    format!(".{class}{{fill:{color}}}line.{class},polyline.{class}{{stroke:{color};fill:none}}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The contrast ratio of two colours, 1 to 21 (Web Content Accessibility Guidelines 2.2).
    fn contrast(a: Rgb, b: Rgb) -> f64 {
        let luminance = |color: Rgb| {
            let [red, green, blue] = color.map(|channel| {
                let share = f64::from(channel) / 255.0;
                if share <= 0.04045 {
                    share / 12.92
                } else {
                    ((share + 0.055) / 1.055).powf(2.4)
                }
            });
            0.2126 * red + 0.7152 * green + 0.0722 * blue
        };
        let (a, b) = (luminance(a) + 0.05, luminance(b) + 0.05);
        a.max(b) / a.min(b)
    }

    fn frame(name: &str) -> (Rgb, Rgb) {
        let (_, light, dark) = FRAME.iter().find(|(class, ..)| *class == name).expect(name);
        (*light, *dark)
    }

    #[test]
    fn text_and_shapes_have_enough_contrast_in_both_themes() {
        let surface = frame("surface");
        for text in ["ink", "muted"].map(frame) {
            assert!(contrast(text.0, surface.0) >= 4.5 && contrast(text.1, surface.1) >= 4.5);
        }
        let waiting = frame("waiting");
        let shapes = DATA.iter().map(|&(_, color)| (color, color));
        for (light, dark) in shapes.chain([waiting]) {
            assert!(contrast(light, surface.0) >= 2.0, "{}", hex(light));
            assert!(contrast(dark, surface.1) >= 3.0, "{}", hex(dark));
        }
    }

    #[test]
    fn numbers_in_cells_have_enough_contrast() {
        let black = [0; 3];
        for (cell, text) in [(SKY, black), (ORANGE, black), (BLUE, [0xff; 3])] {
            assert!(contrast(cell, text) >= 4.5, "{}", hex(cell));
        }
    }
}
