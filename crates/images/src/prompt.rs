//! The tokens of an image in a prompt.

/// A part of the prompt that stands for an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptPiece {
    /// Text that the tokenizer reads, with special tokens by their names.
    Text(String),
    /// So many image tokens, whose embeddings are rows of the image.
    ImageTokens(usize),
}

/// All that replaces the placeholder of an image in a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImagePrompt {
    pieces: Vec<PromptPiece>,
}

impl ImagePrompt {
    /// The pieces in order. Neither two texts nor two runs of image tokens stand beside each other.
    pub fn pieces(&self) -> &[PromptPiece] {
        &self.pieces
    }

    /// The number of image tokens.
    pub fn num_image_tokens(&self) -> usize {
        let runs = self.pieces.iter().map(|piece| match piece {
            PromptPiece::Text(_) => 0,
            PromptPiece::ImageTokens(num_tokens) => *num_tokens,
        });
        runs.sum()
    }

    /// The prompt as text, given the image token's name.
    pub fn to_text(&self, image_token: &str) -> String {
        let texts = self.pieces.iter().map(|piece| match piece {
            PromptPiece::Text(text) => text.clone(),
            PromptPiece::ImageTokens(num_tokens) => image_token.repeat(*num_tokens),
        });
        texts.collect()
    }

    /// The prompt with a text behind it.
    pub fn with_text(mut self, text: &str) -> Self {
        match self.pieces.last_mut() {
            Some(PromptPiece::Text(last)) => last.push_str(text),
            _ => self.pieces.push(PromptPiece::Text(text.to_owned())),
        }
        self
    }

    /// The prompt with image tokens behind it.
    pub fn with_image_tokens(mut self, num_tokens: usize) -> Self {
        match self.pieces.last_mut() {
            Some(PromptPiece::ImageTokens(last)) => *last += num_tokens,
            _ => self.pieces.push(PromptPiece::ImageTokens(num_tokens)),
        }
        self
    }
}
