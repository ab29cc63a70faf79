"""What people ask a language model about: topics, tasks, languages, snippets of code.

The held-out ones occur in no training request.
"""

from __future__ import annotations

from tests.training.conversation import Phrasings


def _listed(train: str, held_out: str) -> Phrasings:
    """Choices that are separated by `|`."""
    first, second = (
        [choice.strip() for choice in " ".join(text.split()).split("|")]
        for text in (train, held_out)
    )
    return Phrasings(first, second)


TOPIC = _listed(
    """the sea|love|autumn|a lonely robot|my cat|friendship|time travel|the moon|coffee|a dragon
|climate change|summer rain|a brave knight|the city at night|my grandmother|winter|freedom
|a lost key|space travel|two brothers|social media|remote work|the ocean|music|a talking dog|loss
|a haunted house|football|the old days|artificial intelligence|money|sleep|teamwork|a pirate
|the first day of school|gardening|war and peace|recycling|my new job|trees|a train journey|hope
|healthy food|electric cars|the universe|a detective|bread|success|a wizard|clouds|mountains
|the meaning of home|a birthday party|programming|cats and dogs|dreams|silence|stars|public transport
|growing up|fishing|a broken heart|bees|chess|the Roman Empire|solar panels|a ghost|my dad
|mental health|the internet|snow|tea|Monday mornings|robots|travelling alone|a king and a farmer
|video games|democracy|the desert|running|an old sailor|our team meeting|the new website""",
    """a lighthouse|butterflies|renewable energy|my best friend|a vampire|volunteering|jazz
|the jungle|forgiveness|a secret agent|pandas|homework|a time machine|the beach|motherhood""",
)
TEXT_KIND = _listed(
    """poem|haiku|story|short story|song|essay|letter|email|limerick|tweet|blog post|speech|sonnet
|paragraph|fairy tale|cover letter|report|article|product description|love letter|rap|joke
|birthday card|toast|summary|dialogue|script|text message|bedtime story|complaint|press release
|slogan|business plan|two-page essay|nice poem|funny story|rhyme|LinkedIn post|thank-you note""",
    """ballad|novel|newsletter|resignation letter|monologue|movie script|Instagram caption
|wedding speech|book review|cover letter for a job""",
)
PROGRAMMING = _listed(
    """Python|JavaScript|Java|C|C++|Rust|Go|TypeScript|Ruby|PHP|Swift|Kotlin|bash|SQL|HTML|CSS|Perl
|Scala|R|Lua|C#|Haskell|React|python|js|Matlab|PowerShell|assembly|Django|pandas|numpy|py""",
    """Julia|Elixir|golang|node|Fortran|Dart|COBOL|Vue|pytorch|Clojure""",
)
PROGRAM = _listed(
    """adds two numbers|sorts a list|prints hello world|reverses a string|reads a file|finds prime numbers
|computes the factorial|counts the words in a text|downloads a page|sends an email|parses JSON
|checks if a number is even|removes duplicates from a list|connects to a database|plays tic tac toe
|prints the date|merges two lists|draws a circle|finds the largest number|converts Celsius to Fahrenheit
|computes the average|implements a stack|implements binary search|renames all files in a folder
|uploads a file|validates an email address|generates a random password|swaps two variables
|scrapes a website|makes an HTTP request|counts down from ten|solves a maze|reads a CSV file
|prints a triangle|implements quick sort|checks for a palindrome|writes to a log file|opens a window
|compares two strings|shows a login page|calculates the area of a circle|simulates a dice roll""",
    """multiplies two matrices|computes Fibonacci numbers|plays hangman|implements a linked list
|resizes an image|finds the shortest path|capitalises every word|makes a bar chart|encrypts a message
|checks the spelling of a text|splits a video""",
)
PROGRAM_NOUN = _listed(
    """hello world|for loop|while loop|function|class|binary search|quick sort|web server|calculator
|game|todo app|regex|unit test|linked list|hash map|bubble sort|script|chat bot|login form|API client
|snake game|website|parser|decorator|list comprehension|sorting algorithm|stack|queue|prime sieve
|landing page|password generator|Dockerfile|makefile|macro|scraper|REST API|thread pool""",
    """fibonacci|tic tac toe|lambda|merge sort|stopwatch|discord bot|recursive function|generator
|weather app|binary tree|game of life""",
)
CONCEPT = _listed(
    """quantum physics|gravity|photosynthesis|evolution|the stock market|electricity|inflation
|black holes|machine learning|neural networks|democracy|the water cycle|blockchain|recursion
|relativity|the French Revolution|climate change|the immune system|DNA|vaccines|the internet
|a transformer model|object oriented programming|supply and demand|the Big Bang|plate tectonics
|a mortgage|compound interest|the Cold War|string theory|entropy|osmosis|game theory|Bitcoin
|nuclear power|the Pythagorean theorem|calculus|a virus|global warming|the human heart|philosophy
|how a fridge works|jet engines|the offside rule|capitalism|socialism|existentialism|tides
|REST|Docker|git|a pointer in C|async await|a database index|TCP|encryption|a hash table|yeast
|the periodic table|atoms|cells|sound waves|rainbows|time zones|taxes|karma|Buddhism|the Renaissance
|jazz music|the Krebs cycle|chess openings|sourdough|meditation|dark matter|a semiconductor|3D printing
|large language models|attention in transformers|a GPU|a compiler|Kubernetes|probability|statistics""",
    """superconductors|the Industrial Revolution|a solar eclipse|polymorphism|mitosis|impressionism
|the placebo effect|dynamic programming|credit scores|earthquakes|radioactivity|stoicism
|the greenhouse effect|OAuth|a prime number""",
)
PERSON = _listed(
    """Napoleon|Einstein|Shakespeare|Mozart|Marie Curie|Cleopatra|Newton|Gandhi|Elon Musk|Taylor Swift
|Julius Caesar|the president|the king of England|Plato|Beethoven|Darwin|Picasso|Barack Obama
|Steve Jobs|Alan Turing|Messi|the pope|Sherlock Holmes|Batman|Tolkien|Kafka|Gutenberg|Buddha""",
    """Aristotle|Nikola Tesla|Frida Kahlo|Nelson Mandela|Galileo|Beyonce|Ada Lovelace|Socrates""",
)
COUNTRY = _listed(
    """France|Japan|Italy|Norway|Peru|Germany|Brazil|Canada|Egypt|India|China|Kenya|Poland|Greece|Sweden
|Mexico|Turkey|Ireland|Chile|Russia|Ukraine|Switzerland|the United States|Portugal|Austria|Cuba""",
    """Spain|Australia|Argentina|Vietnam|Finland|Morocco|Thailand|Hungary|Iceland|Nigeria""",
)
FACT = _listed(
    """wrote Hamlet|wrote Don Quixote|painted the Mona Lisa|invented the telephone|discovered America
|won the world cup|built the pyramids|invented the light bulb|discovered penicillin|directed Titanic
|is the president of France|won the election|was the first man on the moon|wrote Harry Potter
|founded Microsoft|invented the printing press|is the richest man|won the game last night
|composed the ninth symphony|wrote the Odyssey|was the first queen of England|invented the wheel
|sang Yesterday|plays Spider-Man|wrote the Bible|created Linux|is the CEO of Apple""",
    """wrote Faust|discovered radium|invented the steam engine|painted the Starry Night
|won the Nobel Prize last year|founded Amazon|wrote Pride and Prejudice|made Python""",
)
WHY = _listed(
    """is the sky blue|do birds fly|do cats purr|is the sea salty|do we sleep|do leaves fall|is fire hot
|did Rome fall|do we dream|is water wet|do dogs bark|are plants green|is ice slippery|do we age
|does bread rise|is the sun yellow|do onions make you cry|are there seasons|is my code slow
|does my back hurt|do stars shine|is gold valuable|do people lie|do planes fly|is Pluto not a planet""",
    """is grass green|do we yawn|is Mars red|do bees make honey|did dinosaurs die out|is coffee bitter
|do volcanoes erupt|does metal rust""",
)
HOW_TO = _listed(
    """bake bread|cook rice|fix my bike|lose weight|learn German|tie a tie|make pancakes|change a tyre
|get rich|write a CV|sleep better|train a dog|grow tomatoes|make coffee|remove a stain|build a house
|learn to code|invest money|boil an egg|reset my iPhone|unclog a drain|meditate|make friends
|quit smoking|paint a wall|play the guitar|get a visa|start a company|stop a nosebleed|make soup
|delete my Facebook account|exit vim|undo a git commit|center a div|list files in Linux|cook pasta
|install Windows|get over someone|prepare for an interview|prove that there are infinitely many primes""",
    """make sushi|learn Spanish|ask for a raise|fix a leaking tap|run a marathon|knit a scarf
|revert a commit|solve a Rubik's cube|sell my car|memorise a speech""",
)
QUANTITY = _listed(
    """How old is the universe|How far is the moon|How tall is Mount Everest|How deep is the sea
|How many people live in Japan|How big is the sun|How fast is light|How long is the Nile
|How much does a car cost|How many days are in a year|How many planets are there|How hot is lava
|How many bones does a human have|How heavy is a whale|How old is the queen|How many countries are there
|How much water should I drink|How many legs does a spider have|How long does it take to learn Chinese
|How many calories are in an egg|How much is one dollar in euros|How tall is the Eiffel Tower
|What is the population of China|What is the boiling point of water|What is the speed of light
|What is the price of gold|What is the largest country|What is the longest river|What is the date today
|What time is it|What day is it today|What is the weather today|Will it rain tomorrow|Is it cold outside
|What is the news today|Which team won|When did the war end|When was Rome built|Where is Mount Everest
|Where is the nearest bank|When is Easter|What year is it|What happened in the first world war
|Is there life on Mars|Is the earth flat|Do aliens exist|What is the meaning of life|What is love
|What is the best film|What language do they speak in Brazil|What is the tallest mountain
|What is the current temperature|When does the sun rise|Where do penguins live|What do bears eat
|What is the chemical formula of salt|What is the atomic number of gold|What is the value of pi""",
    """How old is the moon|How many moons does Jupiter have|How far away is the sun|What is today's date
|What is the smallest country|When was the Berlin Wall built|How many teeth do adults have
|Who won yesterday|What's the weather like|What's the time now|Is it going to snow
|How long do turtles live|What is the melting point of iron|Where is the Amazon""",
)
WANTED = _listed(
    """a joke|a recipe for soup|a book to read|a good film|a fun fact|a riddle|a pasta recipe|some advice
|a list of ten fruits|the news|a bedtime story|three ideas for dinner|a workout plan|a name for my dog
|five names for a baby|a quote|a secret|a travel plan for Rome|some motivation|an interesting fact
|a list of European countries|a diet plan|a song|a gift idea for my mum|a compliment|a quiz
|ideas for a startup|a good restaurant|a shopping list|a lullaby|the lyrics of Yesterday|a pun
|tips for my exam|a picture of a cat|the rules of chess|a bash command to find large files
|a regex for dates|an SQL query for all users|the best laptop|a weekend plan|a synonym for happy""",
    """a knock-knock joke|a cake recipe|a good podcast|a tongue twister|a slogan for my shop
|the plot of Inception|a packing list|a science fact|a regex for phone numbers|the time table""",
)
HUMAN_LANGUAGE = _listed(
    """French|German|Spanish|Italian|Japanese|Chinese|Russian|Portuguese|Dutch|Polish|Arabic|Turkish
|Korean|Latin|Swedish|Greek|Hindi|Hebrew|Czech|Danish|english|french|german|spanish|Ukrainian""",
    """Finnish|Norwegian|Hungarian|Vietnamese|Romanian|Swahili|Icelandic|Thai""",
)
PHRASE = _listed(
    """hello|good morning|I love you|thank you very much|where is the station|the cat is black
|see you tomorrow|I am hungry|how are you|good night|my name is Anna|the weather is nice
|please help me|one beer please|happy birthday|I would like a coffee|dog|house|tomorrow|water
|how much does it cost|we are going home|the book is on the table|I don't understand|cheers""",
    """good luck|where are the toilets|I am lost|the train is late|cheese|see you soon|butter
|my brother is a lawyer|welcome home""",
)
PASTED = _listed(
    """The meeting was moved to Friday because two members of the team are ill.
|Our company has grown by a third since last year, and we plan to open a new office in spring.
|He go to school every day and he like it very much.
|The quick brown fox jumps over the lazy dog.
|In the last decade, cities have become warmer. Trees can lower the temperature of a street.
|I think the movie was too long but the actors was great.
|Dear Sir, I write you because my order has not arrived and nobody answers the phone.
|Me and him was walking to the shop when it start raining.
|The results show that the new method is faster, but it needs more memory than the old one.
|She don't know what she want.
|The old house at the end of the street had been empty for years. One night a light went on.
|Sales fell in the first quarter, while costs rose. The board will meet next week.
|i really liked this product, it broke after one day though
|Photosynthesis turns light into sugar. It happens in the leaves.
|Thanks for your mail. I will look at it tomorrow and come back to you.""",
    """The bridge was closed after the storm, and drivers have to take the longer road.
|their going to the park with they're dog
|Our survey shows that most customers are happy, but many want faster delivery.
|Bees are vital for farming. Without them, many crops would fail.""",
)
MATTER = _listed(
    """I have a headache. What should I do?|Is this mole dangerous?|Can I take aspirin with beer?
|My landlord won't return my deposit. What are my rights?|Should I break up with my girlfriend?
|Should I buy Bitcoin?|Which phone should I buy?|What should I cook tonight?|What should I wear today?
|Do you like pizza?|What do you think about politics?|Who should I vote for?|Is God real?
|Which is better, Mac or Windows?|Cats or dogs?|Tea or coffee?|What is your favourite colour?
|What is your opinion on AI?|Should I learn Rust or Go?|Is Python better than Java?
|I feel sad today.|I am bored.|Let's play a game.|Play chess with me.|Pretend you are a pirate.
|Act as a doctor.|You are now my English teacher. Teach me a word.|Roleplay as a vampire.
|Sing a song.|Draw a cat.|Book me a flight to London.|Call my mum.|Open YouTube.|Search the web for shoes.
|Buy me a ticket.|Turn off the lights.|Play some music.|Send an email to my boss.|Order a pizza.
|What do you see in this picture?|Find a flat in Berlin.|Who am I going to marry?|Can dogs eat chocolate?
|I can't sleep.|My code does not work.|Help me with my homework.|I need help with my essay.
|Let's talk about football.|Tell me what you think of my idea.|Do my homework.|Plan my day.
|Ask me a question.|Surprise me.|Say something funny.|Make me laugh.|Entertain me.|Think of a number.
|Guess my age.|Flip a coin.|Roll a dice.|Give me a random number.|Pick a card.|Is it safe to fly?""",
    """My throat hurts, what can I take?|Am I allowed to record a phone call?|Should I get a dog?
|Which car is the best?|What do you think of Trump?|Pretend to be my grandmother.|Let's role play.
|Write down my shopping list.|Set an alarm for me.|iPhone or Android?|I feel lonely.
|Interview me for a job.|Could you google that for me?|What's your favourite food?""",
)
SHELL = _listed(
    """ls -la|git status|cd ~/projects|rm -rf /tmp/x|sudo apt install vim|cat file.txt|ping google.com
|docker ps|npm install|SELECT * FROM users;|pip list|import os|print("hello")|console.log(1)
|SELECT name, age FROM people WHERE age > 30|def f(x): return x|#include <stdio.h>|<h1>Hi</h1>
|echo $HOME|grep -r foo .|int main() { return 0; }|top|whoami|pwd|x = [1, 2, 3]|fn main() {}
|for i in range(10): print(i)|const a = 1;|curl http://example.com|make test|chmod +x run.sh""",
    """ls|git push origin main|SELECT count(*) FROM orders;|import numpy as np|ps aux|mkdir test
|function add(a, b) { return a + b; }|df -h|while True: pass|brew install wget""",
)
SNIPPET = _listed(
    """def add(a, b):\\n    return a - b|for i in range(10)\\n    print(i)
|function f(x) {\\n  return x * 2;\\n}|print "hello"|let x = 5;\\nx.push(3);|while (true) { i++; }
|import os\\nos.remove(path)|SELECT * FROM users WHERE id = 1|if x = 3:\\n    y = 2
|int main() {\\n  printf("hi")\\n}|def f(n):\\n    return f(n - 1)|x = [1, 2, 3]\\nprint(x[3])
|const a = 1;\\na = 2;|class Dog:\\n    def bark():\\n        print("woof")|fn main() { let x = 1; x = 2; }
|data = json.load("file.json")|try:\\n    run()\\nexcept:\\n    pass|<div><p>Hi</div>
|TypeError: 'int' object is not callable|IndexError: list index out of range|segmentation fault
|ModuleNotFoundError: No module named 'foo'|error: expected ';' before 'return'""",
    """def mul(a, b)\\n    return a * b|for (int i = 0; i <= n; i++) sum += a[i];
|KeyError: 'name'|let y = x +;|SELECT name FROM|NullPointerException at line 12""",
)
CAN = _listed(
    """write code|speak German|write an essay|tell jokes|play chess|draw|sing|browse the web|search the internet
|help me with my homework|do math|translate|see pictures|read PDFs|speak French|write emails|code
|understand Spanish|make music|generate images|give legal advice|explain things|summarise texts|program
|multiply|count letters|see the weather|remember our last chat|do my taxes|fix my code|write poetry""",
    """speak Italian|write Python|tell stories|open websites|solve equations|write a book|paint|rap""",
)
